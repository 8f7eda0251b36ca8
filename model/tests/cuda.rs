//! Tests the decoder on CUDA: it agrees with the CPU's decoder, and its bits depend on the text alone. Runs on the
//! emulator with `cargo test --workspace --features tidegate-model/cuda-emulator --test cuda`, or on the GPU that
//! `TIDEGATE_TEST_DEVICE` names.
#![cfg(feature = "cuda-emulator")]

mod common;

use common::{Numbers, bits, config, distance, write_checkpoint};
use tidegate_model::cuda::{self, CudaDecoder, CudaDevice, CudaPool};
use tidegate_model::{Backend, Decoder, DecoderConfig, Device, StateType, WeightType, checkpoint};

/// Configs that together use every path of the kernels.
const KINDS: [&str; 9] = [
    "",
    r#", "gate": false"#,
    r#", "tie_word_embeddings": true, "conv_kernel": 4"#,
    r#", "output_norm": true, "conv_kernel": 3"#,
    r#", "position_embedding": "rope""#,
    r#", "feature_map": "arc_cosine", "proj_dim": 40"#,
    r#", "feature_map": "elu", "proj_dim": 0, "head_dim": 24"#,
    // Every thread has full rows of S, and blocks of a scan share a head.
    r#", "head_dim": 64, "proj_dim": 64"#,
    r#", "head_dim": 40, "proj_dim": 100, "output_norm": true"#,
];

/// Opens the emulator, or the GPU that `TIDEGATE_TEST_DEVICE` names (`cuda:0`).
fn device() -> CudaDevice {
    match std::env::var("TIDEGATE_TEST_DEVICE") {
        Ok(name) => CudaDevice::open(name.trim_start_matches("cuda:").parse().unwrap()).unwrap(),
        Err(_) => CudaDevice::emulated(),
    }
}

/// Loads one checkpoint on both devices.
fn both(config: &DecoderConfig, seed: u64) -> (Decoder, CudaDecoder) {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), config, seed);
    let cpu = checkpoint::load(folder.path(), &Device::Cpu).unwrap();
    (cpu, cuda::load(folder.path(), &device()).unwrap())
}

fn step(decoder: &CudaDecoder, pool: &mut CudaPool, ids: &[u32], slots: &[usize]) -> Vec<f32> {
    // Old contents of the buffer must not show.
    let mut logits = vec![f32::NAN; 3];
    decoder.decode_into(ids, pool, slots, &mut logits).unwrap();
    logits
}

#[test]
fn logits_and_states_agree_with_the_cpu() {
    for (seed, extra) in KINDS.iter().enumerate() {
        let config = config(extra);
        let (cpu, gpu) = both(&config, seed as u64);
        let ids = Numbers::new(3).ids(21, config.vocab_size);
        let (mut ours, mut theirs) = (gpu.new_pool(3, StateType::F32).unwrap(), cpu.new_pool(3).unwrap());
        // Two prompts, then decode steps of both slots.
        gpu.prefill(&ids[..11], &mut ours, 1).unwrap();
        cpu.prefill(&ids[..11], &mut theirs, 1).unwrap();
        gpu.prefill(&ids[..3], &mut ours, 2).unwrap();
        cpu.prefill(&ids[..3], &mut theirs, 2).unwrap();
        for pair in ids[11..].chunks_exact(2) {
            let want = cpu.decode(pair, &mut theirs, &[1, 2]).unwrap();
            let got = step(&gpu, &mut ours, pair, &[1, 2]);
            let most = want.iter().fold(1.0f32, |m, v| m.max(v.abs()));
            assert!(distance(&got, &want) < 2e-4 * most, "{extra}: {}", distance(&got, &want));
        }
        let (got, want) = (ours.export(1).unwrap(), theirs.export(1).unwrap());
        assert!(distance(&got, &want) < 1e-4, "{extra}: states differ by {}", distance(&got, &want));
        let (counted, all) = (ours.denominators(), theirs.denominators());
        assert_eq!(counted.all, all.all, "{extra}");
        // A denominator close to its floor may be clamped on only one of the devices.
        assert!(counted.clamped.abs_diff(all.clamped) <= 1, "{extra}: {counted:?} {all:?}");
    }
}

#[test]
fn sixteen_bit_weights_agree_with_the_cpu_up_to_the_rounding_of_their_inputs() {
    // With quantized weights, the CPU rounds inputs to eight bits; on the GPU, inputs and weights are f16.
    for (kind, bound) in [(WeightType::Bf16, 3e-2), (WeightType::F16, 4e-3), (WeightType::Q8_0, 5e-2)] {
        let config = config(r#", "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "proj_dim": 16"#);
        let cpu = Decoder::random(config.clone(), kind, 5).unwrap();
        let gpu = CudaDecoder::random(config.clone(), kind, 5, &device()).unwrap();
        let ids = Numbers::new(4).ids(40, config.vocab_size);
        let (mut ours, mut theirs) = (gpu.new_pool(40, StateType::F32).unwrap(), cpu.new_pool(40).unwrap());
        gpu.prefill(&ids[..9], &mut ours, 0).unwrap();
        cpu.prefill(&ids[..9], &mut theirs, 0).unwrap();
        let got = step(&gpu, &mut ours, &ids[9..10], &[0]);
        let want = cpu.decode(&ids[9..10], &mut theirs, &[0]).unwrap();
        let most = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert!(distance(&got, &want) < bound * most, "{kind}: {} of {most}", distance(&got, &want));
    }
}

/// Checks that a text's bits do not depend on calls, slots, moves or a batch of `rows` rows.
fn promises(decoder: &CudaDecoder, state: StateType, rows: usize) {
    let vocab = decoder.config().vocab_size;
    let ids = Numbers::new(11).ids(rows.max(12), vocab);
    let text = &ids[..12];
    let mut pool = decoder.new_pool(rows, state).unwrap();
    decoder.prefill(&text[..11], &mut pool, 0).unwrap();
    let want = (bits(&step(decoder, &mut pool, &text[11..], &[0])), bits(&pool.export(0).unwrap()));
    // The same text in other pieces in another slot; the last case has only decode steps.
    for cuts in [&[5usize, 11][..], &[1, 2, 11], &[]] {
        let slot = rows - 1;
        pool.reset(slot).unwrap();
        let mut start = 0;
        for &cut in cuts {
            decoder.prefill(&text[start..cut], &mut pool, slot).unwrap();
            start = cut;
        }
        let mut logits = Vec::new();
        for id in &text[start..] {
            logits = step(decoder, &mut pool, &[*id], &[slot]);
        }
        assert_eq!((bits(&logits), bits(&pool.export(slot).unwrap())), want, "cut at {cuts:?}");
    }
    // The same text in a batch, after an export and an import.
    pool.reset(0).unwrap();
    decoder.prefill(&text[..11], &mut pool, 0).unwrap();
    let moved = pool.export(0).unwrap();
    for slot in 0..rows {
        pool.import(slot, &moved, 11).unwrap();
        if slot % 2 == 1 {
            decoder.prefill(&ids[slot..=slot], &mut pool, slot).unwrap();
        }
    }
    let slots: Vec<usize> = (0..rows).collect();
    let tokens: Vec<u32> = slots.iter().map(|slot| if slot % 2 == 0 { text[11] } else { ids[*slot] }).collect();
    let logits = step(decoder, &mut pool, &tokens, &slots);
    for slot in slots.into_iter().step_by(2) {
        assert_eq!(bits(&logits[slot * vocab..][..vocab]), want.0, "row {slot} of {rows}");
        assert_eq!(bits(&pool.export(slot).unwrap()), want.1, "slot {slot} of {rows}");
    }
}

#[test]
fn bits_do_not_depend_on_calls_slots_or_batch() {
    for (seed, extra) in KINDS.iter().enumerate() {
        let (_, decoder) = both(&config(extra), seed as u64);
        for state in [StateType::F32, StateType::Bf16] {
            promises(&decoder, state, 5);
        }
    }
}

#[test]
fn products_of_few_and_of_many_rows_have_the_same_bits() {
    // Inner widths of 3, 5 and 9 tiles, whose slices are empty, uneven, or longer than one tile.
    for (hidden, inner) in [(72, 130), (264, 88)] {
        let extra =
            format!(r#", "hidden_size": {hidden}, "intermediate_size": {inner}, "head_dim": 16, "proj_dim": 8"#);
        for kind in [WeightType::Bf16, WeightType::F16] {
            let decoder = CudaDecoder::random(config(&extra), kind, 9, &device()).unwrap();
            for rows in [7, 13, 30, 37] {
                promises(&decoder, StateType::F32, rows);
            }
        }
    }
}

#[test]
fn a_bf16_state_is_rounded_fairly_by_chance() {
    // With a slow gate, rounding to nearest would keep the sums from growing. With stochastic rounding, the two states
    // stay close, and the differences cancel out.
    let (_, decoder) = both(&config(r#", "head_dim": 16, "num_hidden_layers": 1"#), 2);
    let ids = Numbers::new(8).ids(400, decoder.config().vocab_size);
    let read = |state| {
        let mut pool = decoder.new_pool(1, state).unwrap();
        decoder.prefill(&ids, &mut pool, 0).unwrap();
        pool.export(0).unwrap()
    };
    let (exact, rounded) = (read(StateType::F32), read(StateType::Bf16));
    let size = exact.iter().map(|v| v.abs()).sum::<f32>();
    let sum = exact.iter().zip(&rounded).map(|(a, b)| a - b).sum::<f32>();
    let spread = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).sum::<f32>();
    assert!(spread > 0.0 && spread < 2e-2 * size, "{spread} of {size}");
    assert!(sum.abs() < 2e-3 * size, "{sum} of {size}");
}

#[test]
fn a_state_continues_on_the_other_device() {
    let (cpu, gpu) = both(&config(r#", "conv_kernel": 3"#), 6);
    let ids = Numbers::new(5).ids(12, cpu.config().vocab_size);
    let (mut ours, mut theirs) = (gpu.new_pool(1, StateType::F32).unwrap(), cpu.new_pool(2).unwrap());
    cpu.prefill(&ids[..11], &mut theirs, 0).unwrap();
    ours.import(0, &theirs.export(0).unwrap(), 11).unwrap();
    assert_eq!(ours.tokens(0), 11);
    // A state that is imported and exported again has the same bits.
    assert_eq!(bits(&ours.export(0).unwrap()), bits(&theirs.export(0).unwrap()));
    let want = cpu.decode(&ids[11..], &mut theirs, &[0]).unwrap();
    let got = step(&gpu, &mut ours, &ids[11..], &[0]);
    assert!(distance(&got, &want) < 1e-4);
    theirs.import(1, &ours.export(0).unwrap(), 12).unwrap();
    // The device pads columns of 24 numbers to 32.
    assert_eq!(ours.state_bytes() - theirs.state_bytes(), 2 * 2 * 8 * 8 * 4);
}

#[test]
fn a_prompt_longer_than_a_prefill_step() {
    // A layer whose blocks share a head, and one whose threads have the most columns.
    for extra in
        [r#", "num_hidden_layers": 1, "head_dim": 64, "proj_dim": 4"#, r#", "num_hidden_layers": 1, "head_dim": 128"#]
    {
        let (cpu, gpu) = both(&config(extra), 4);
        let ids = Numbers::new(2).ids(1026, cpu.config().vocab_size);
        let (mut ours, mut theirs) = (gpu.new_pool(2, StateType::F32).unwrap(), cpu.new_pool(1).unwrap());
        // In slot 0, the last prefill step has one token. Slot 1 and the CPU read the same text in other pieces.
        gpu.prefill(&ids[..1025], &mut ours, 0).unwrap();
        gpu.prefill(&ids[..700], &mut ours, 1).unwrap();
        gpu.prefill(&ids[700..1025], &mut ours, 1).unwrap();
        cpu.prefill(&ids[..1025], &mut theirs, 0).unwrap();
        assert_eq!(bits(&ours.export(0).unwrap()), bits(&ours.export(1).unwrap()));
        assert!(distance(&ours.export(0).unwrap(), &theirs.export(0).unwrap()) < 2e-4);
        let want = cpu.decode(&ids[1025..], &mut theirs, &[0]).unwrap();
        assert!(distance(&step(&gpu, &mut ours, &ids[1025..], &[0]), &want) < 1e-3);
        assert_eq!((ours.tokens(0), ours.tokens(1)), (1026, 1025));
    }
}

#[test]
fn a_pool_of_another_decoder_is_refused() {
    let ((_, one), (_, other)) = (both(&config(""), 1), both(&config(""), 2));
    let mut pool = one.new_pool(1, StateType::F32).unwrap();
    step(&one, &mut pool, &[1], &[0]);
    let error = other.decode_into(&[1], &mut pool, &[0], &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("another's"), "{error}");
    assert!(other.prefill(&[1], &mut pool, 0).is_err());
    step(&one, &mut pool, &[1], &[0]);
}

#[test]
fn invalid_calls_are_refused_and_change_nothing() {
    let (_, decoder) = both(&config(""), 1);
    let mut pool = decoder.new_pool(2, StateType::F32).unwrap();
    decoder.prefill(&[1, 2], &mut pool, 0).unwrap();
    let before = bits(&pool.export(0).unwrap());
    let mut refused = |ids: &[u32], slots: &[usize]| {
        decoder.decode_into(ids, &mut pool, slots, &mut Vec::new()).unwrap_err().to_string()
    };
    assert!(refused(&[61], &[0]).contains("vocabulary of 61"));
    assert!(refused(&[1, 1], &[0, 0]).contains("named twice"));
    assert!(refused(&[1], &[2]).contains("out of range"));
    assert!(refused(&[1, 2], &[0]).contains("one token for each slot"));
    assert!(refused(&[], &[]).contains("at least one"));
    assert!(decoder.prefill(&[], &mut pool, 0).is_err());
    assert!(pool.import(0, &[1.0], 1).unwrap_err().to_string().contains("numbers"));
    assert_eq!(bits(&pool.export(0).unwrap()), before);
    // The slots of a refused step still work.
    step(&decoder, &mut pool, &[5, 6], &[0, 1]);
    assert!(decoder.new_pool(0, StateType::F32).is_err());
    let error = decoder.new_pool(1 << 30, StateType::F32).unwrap_err().to_string();
    assert!(error.contains("free"), "{error}");
}

#[test]
fn slots_are_limited_by_free_memory() {
    let (_, decoder) = both(&config(r#", "num_hidden_layers": 1"#), 1);
    for state in [StateType::F32, StateType::Bf16] {
        assert_eq!(decoder.room(state, 700).unwrap(), 700);
        assert_eq!(decoder.room(state, 0).unwrap(), 1);
        let pool = decoder.new_pool(decoder.room(state, 900).unwrap(), state).unwrap();
        assert_eq!(pool.slots(), 900);
    }
}

#[test]
fn a_mixer_without_kernels_is_refused_by_name() {
    let softmax = r#", "attention": "softmax", "sliding_window": 8"#;
    let wide = r#", "head_dim": 256"#;
    let many = r#", "proj_dim": 300"#;
    for (extra, word) in
        [(softmax, "softmax"), (r#", "feature_map": "favor""#, "favor"), (wide, "head_dim"), (many, "features")]
    {
        let error = CudaDecoder::random(config(extra), WeightType::F32, 1, &device()).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn the_error_names_a_missing_device() {
    // No machine has this many devices, with or without a driver.
    let error = CudaDevice::open(1000).unwrap_err().to_string();
    assert!(error.contains("CUDA device 1000 is not available"), "{error}");
}
