//! What a decoder of the hybrid promises, as `decoder.rs` and `softmax.rs` have it of theirs.

use crate::common::promises::{self, pool};
use crate::common::{Numbers, bits, config, decoder, distance, flat, row, written};
use tidegate_model::probe::Probe;
use tidegate_model::{Decoder, DecoderConfig, Denominators, StateType, WeightType, checkpoint};

/// Windows of one token, of less than a block, and of some blocks of which the last is no whole one.
const KINDS: [&str; 4] = [
    r#", "attention": "hybrid", "sliding_window": 1"#,
    r#", "attention": "hybrid", "sliding_window": 40, "position_embedding": "none", "conv_kernel": 4"#,
    r#", "attention": "hybrid", "sliding_window": 70, "gate": false, "tie_word_embeddings": true"#,
    r#", "attention": "hybrid", "sliding_window": 300, "output_norm": true"#,
];

#[test]
fn step_by_step_and_cut_anywhere_have_the_bits_of_one_forward_pass() {
    for kind in KINDS {
        for state_type in [StateType::F32, StateType::Bf16] {
            let cuts = [1, 39, 40, 41, 111, 256, 300, 301];
            promises::cut_anywhere(&decoder(kind, 3), state_type, 410, &cuts, kind);
        }
    }
}

#[test]
fn a_state_goes_on_in_another_pool_and_a_slot_used_again_shows_nothing() {
    for kind in KINDS {
        for state_type in [StateType::F32, StateType::Bf16] {
            promises::moved_anywhere(&decoder(kind, 17), state_type, 400, &[30, 280, 370], kind);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_and_slot() {
    for kind in KINDS {
        promises::alone_or_together(&decoder(kind, 7), [1, 400, 3, 33, 290], kind);
    }
}

#[test]
fn threads_change_no_bit() {
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64, "proj_dim": 64, "attention": "hybrid",
        "sliding_window": 300}"#;
    let decoder = written(&DecoderConfig::from_json(text).unwrap(), 20);
    for state_type in [StateType::F32, StateType::Bf16] {
        promises::threads_change_no_bit(&decoder, state_type, (500, 250), 100);
    }
}

#[test]
fn half_the_bytes_give_nearly_the_same_logits() {
    for kind in KINDS {
        let decoder = decoder(kind, 7);
        let ids = Numbers::new(8).ids(400, 61);
        let (mut half, mut full) = (pool(&decoder, 1, StateType::Bf16), pool(&decoder, 1, StateType::F32));
        let want = decoder.prefill(&ids, &mut full, 0).unwrap();
        let error = distance(&decoder.prefill(&ids, &mut half, 0).unwrap(), &want);
        assert!(error > 0.0 && error < 0.05, "{kind}: {error}");
        assert!(half.state_bytes() < full.state_bytes() * 7 / 10, "{kind}");
    }
}

#[test]
fn state_bytes_do_not_depend_on_the_text() {
    let decoder = decoder(KINDS[1], 14);
    let mut pool = decoder.new_pool(1).unwrap();
    let ids = Numbers::new(15).ids(1000, 61);
    let (bytes, numbers) = (pool.state_bytes(), pool.export(0).unwrap().len());
    for _ in 0..20 {
        decoder.absorb(&ids, &mut pool, 0).unwrap();
    }
    assert_eq!((pool.tokens(0), pool.state_bytes()), (20_000, bytes));
    let after = pool.export(0).unwrap();
    assert_eq!((after.len(), after.len() * 4), (numbers, decoder.config().state_bytes()));
    // S, z, c; keys, values and gates of the window; the convolution's inputs.
    assert_eq!(numbers, 2 * (2 * (24 * 9 + 1 + 2 * 40 * 8 + 40) + 3 * 48));
    assert!(after.iter().all(|v| v.is_finite()));
}

#[test]
fn denominators_of_the_far_part_are_counted_and_the_probe_changes_no_bit() {
    let mut most = 0;
    for (kind, window) in KINDS.into_iter().zip([1, 40, 70, 300]) {
        let decoder = decoder(kind, 17);
        let ids = Numbers::new(18).ids(320, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let mut probe = Probe::new();
        let probed = flat(&decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap());
        assert_eq!(pool.denominators(), Denominators::default());
        decoder.absorb(&ids[..310], &mut pool, 0).unwrap();
        let last = ids[310..].iter().map(|&id| decoder.decode(&[id], &mut pool, &[0]).unwrap()).last().unwrap();
        assert_eq!(bits(&probed[319 * 61..]), bits(&last), "{kind}");
        let clamped = probe.iter().flat_map(|layer| &layer.clamped).sum::<u64>();
        assert_eq!(pool.denominators(), Denominators { all: (320 - window) * 2 * 2, clamped }, "{kind}");
        for layer in &probe {
            let gates = if decoder.config().gate { 2 } else { 0 };
            assert_eq!((layer.tokens, layer.clamped.len(), layer.log_gate.len()), (320, 2, gates), "{kind}");
            assert_eq!(layer.denominators, 320 - window, "{kind}");
            assert!(layer.log_gate.iter().all(|&sum| sum < 0.0));
        }
        most = most.max(clamped);
    }
    assert!(most > 0, "nothing was clamped: the test shows nothing");
}

#[test]
fn a_checkpoint_has_the_tensors_of_both_and_a_bias() {
    for (kind, gate) in [(KINDS[1], true), (KINDS[2], false)] {
        let tensors = checkpoint::tensors(&config(kind));
        let at = |part: &str| tensors.get(&format!("model.layers.1.self_attn.{part}"));
        assert_eq!(at("far_bias"), Some(&vec![2]));
        assert!(["sigma", "random_matrices", "o_proj.weight"].into_iter().all(|part| at(part).is_some()));
        assert_eq!((at("gate.weight").is_some(), at("gate.bias").is_some()), (gate, gate));
        let random = Decoder::random(config(kind), WeightType::F32, 1).unwrap();
        let logits = random.prefill(&Numbers::new(1).ids(100, 61), &mut random.new_pool(1).unwrap(), 0).unwrap();
        assert!(logits.iter().all(|v| v.is_finite()) && logits.iter().any(|v| v.abs() > 0.1));
    }
}
