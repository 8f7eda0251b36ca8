//! What a decoder promises: cut anywhere, batched with anyone, in any slot, at any depth, a text gives the same.

use crate::common::{Numbers, bits, decoder, distance, flat, promises, row};
use tidegate_model::Denominators;
use tidegate_model::probe::Probe;
use tidegate_model::{Decoder, PoolOptions, StatePool, StateType, Tensor, Threads};

const KINDS: [&str; 10] = [
    "",
    r#", "conv_kernel": 4, "output_norm": true, "tie_word_embeddings": true"#,
    r#", "position_embedding": "rope""#,
    r#", "gate": false, "conv_kernel": 3"#,
    r#", "feature_map": "arc_cosine""#,
    r#", "feature_map": "arc_cosine", "gate": false, "position_embedding": "rope""#,
    r#", "feature_map": "elu", "proj_dim": 0"#,
    r#", "feature_map": "elu", "proj_dim": 0, "gate": false, "position_embedding": "rope""#,
    r#", "feature_map": "favor", "output_norm": true"#,
    r#", "feature_map": "favor", "gate": false, "position_embedding": "rope""#,
];

/// All state of a slot.
fn state(decoder: &Decoder, pool: &StatePool, slot: usize) -> Vec<f32> {
    let layers = 0..decoder.config().num_hidden_layers;
    let parts = layers.map(|layer| pool.layer(layer, slot).unwrap());
    parts.flat_map(|(memory, conv)| [Some(memory), conv]).flatten().flat_map(|t| flat(&t)).collect()
}

#[test]
fn step_by_step_and_cut_anywhere_have_the_bits_of_one_forward_pass() {
    for kind in KINDS {
        let cuts = [1, 2, 3, 63, 64, 65, 100, 128, 130, 149];
        promises::cut_anywhere(&decoder(kind, 3), StateType::F32, 150, &cuts, kind);
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_and_slot() {
    for kind in KINDS {
        promises::alone_or_together(&decoder(kind, 7), [1, 70, 3, 33, 128], kind);
    }
}

#[test]
fn the_chunked_form_gives_what_serving_gives() {
    for kind in KINDS {
        let decoder = decoder(kind, 3);
        let ids = Numbers::new(4).ids(150, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let served = flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap());
        let mut probe = Probe::default();
        let chunked = flat(&decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap());
        assert!(distance(&served, &chunked) < 1e-4, "{kind}: {}", distance(&served, &chunked));
        // What is summed without a gate grows with the text, and its rounding with it.
        let (served, chunked) = (state(&decoder, &pool, 0), state(&decoder, &pool, 1));
        let error = served.iter().zip(&chunked).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f32::max);
        assert!(error < 1e-4 && chunked.iter().all(|v| v.is_finite()), "{kind}: {error}");
    }
}

#[test]
fn a_state_put_into_another_pool_goes_on_as_if_it_had_never_left() {
    for kind in KINDS {
        let decoder = decoder(kind, 17);
        let ids = Numbers::new(18).ids(90, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        decoder.absorb(&ids[..70], &mut pool, 1).unwrap();
        let numbers = pool.export(1).unwrap();
        assert_eq!(numbers.len(), pool.layout().numbers());
        assert_eq!(numbers.len() * 4, pool.state_bytes());
        assert_eq!(bits(&numbers), bits(&memories_then_convolutions(&decoder, &pool, 1)), "{kind}");

        let mut other = decoder.new_pool(3).unwrap();
        decoder.absorb(&ids[..33], &mut other, 0).unwrap();
        decoder.absorb(&ids[..44], &mut other, 2).unwrap();
        let beside = state(&decoder, &other, 0);
        other.import(2, &numbers, 70).unwrap();
        assert_eq!((other.tokens(0), other.tokens(2)), (33, 70));
        assert_eq!(bits(&state(&decoder, &other, 0)), bits(&beside), "{kind}: a neighbour has changed");
        let stayed = decoder.prefill(&ids[70..], &mut pool, 1).unwrap();
        let moved = decoder.prefill(&ids[70..], &mut other, 2).unwrap();
        assert_eq!(bits(&stayed), bits(&moved), "{kind}");
        assert!(other.import(2, &numbers[1..], 70).unwrap_err().to_string().contains("numbers"));
        assert!(other.import(3, &numbers, 70).is_err() && other.export(3).is_err());
    }
}

#[test]
fn a_maximum_that_no_keys_have_is_refused_and_a_low_one_forgets_alone() {
    let decoder = decoder(r#", "feature_map": "favor""#, 17);
    let ids = Numbers::new(18).ids(20, 61);
    let mut pool = decoder.new_pool(2).unwrap();
    decoder.absorb(&ids, &mut pool, 0).unwrap();
    let numbers = pool.export(0).unwrap();
    let (head, greatest) = (pool.layout().head, decoder.greatest_maxima());
    assert_eq!(greatest.len(), numbers.len() / head);
    assert!(numbers.chunks_exact(head).zip(&greatest).all(|(head, &most)| head[head.len() - 1] <= most));
    // The third head's alone, then the same of a state that has seen nothing.
    let with = |numbers: &[f32], maximum: f32| {
        let mut foreign = numbers.to_vec();
        foreign[3 * head - 1] = maximum;
        foreign
    };
    for wrong in [greatest[2] * 1.01, 1e30, f32::MAX, f32::INFINITY] {
        let error = pool.import(0, &with(&numbers, wrong), 20).unwrap_err().to_string();
        assert!(error.contains("layer 1, head 0") && error.contains("at most"), "{error}");
        assert_eq!(bits(&pool.export(0).unwrap()), bits(&numbers), "{wrong}: a refused state was written");
    }
    let fresh: Vec<f32> = ids.iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[1]).unwrap()).collect();
    let mut read = |numbers: &[f32]| {
        pool.import(0, numbers, 0).unwrap();
        let logits: Vec<f32> = ids.iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[0]).unwrap()).collect();
        assert!(pool.export(0).unwrap().iter().all(|v| v.is_finite()));
        logits
    };
    // What an empty head remembers as maximum says nothing.
    for maximum in [greatest[2], -90.0, f32::MIN] {
        assert_eq!(bits(&read(&with(&vec![0.0; numbers.len()], maximum))), bits(&fresh), "{maximum}");
    }
    // So far below that nothing of what was before is left.
    for low in [-1e30, f32::MIN] {
        let mut foreign = numbers.clone();
        foreign.iter_mut().skip(head - 1).step_by(head).for_each(|maximum| *maximum = low);
        assert_eq!(bits(&read(&foreign)), bits(&fresh), "{low}");
    }
    assert_ne!(bits(&read(&numbers)), bits(&fresh));
}

/// All state of a slot, in the order of an export.
fn memories_then_convolutions(decoder: &Decoder, pool: &StatePool, slot: usize) -> Vec<f32> {
    let layers = 0..decoder.config().num_hidden_layers;
    let (memories, convolutions): (Vec<_>, Vec<_>) = layers.map(|layer| pool.layer(layer, slot).unwrap()).unzip();
    memories.iter().chain(convolutions.iter().flatten()).flat_map(flat).collect()
}

#[test]
fn a_batched_prefill_equals_each_row_alone() {
    let decoder = decoder(KINDS[1], 9);
    let ids = Numbers::new(10).ids(3 * 90, 61);
    let batch = Tensor::from_slice(&ids, (3, 90), &tidegate_model::Device::Cpu).unwrap();
    let mut pool = decoder.new_pool(4).unwrap();
    let all = flat(&decoder.forward(&batch, &mut pool, &[2, 0, 3]).unwrap());
    for i in 0..3 {
        pool.reset(1).unwrap();
        let one = flat(&decoder.forward(&row(&ids[i * 90..][..90]), &mut pool, &[1]).unwrap());
        assert_eq!(bits(&one), bits(&all[i * 90 * 61..][..90 * 61]));
    }
}

#[test]
fn a_slot_used_again_shows_nothing_of_its_former_text() {
    for kind in KINDS {
        let decoder = decoder(kind, 11);
        let ids = Numbers::new(12).ids(50, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let fresh = decoder.prefill(&ids, &mut pool, 0).unwrap();
        decoder.prefill(&Numbers::new(13).ids(77, 61), &mut pool, 1).unwrap();
        pool.reset(1).unwrap();
        assert!(state(&decoder, &pool, 1).iter().all(|&v| v == 0.0));
        assert_eq!(pool.tokens(1), 0);
        assert_eq!(bits(&decoder.prefill(&ids, &mut pool, 1).unwrap()), bits(&fresh));
    }
}

#[test]
fn state_bytes_do_not_depend_on_the_text() {
    let decoder = decoder(KINDS[1], 14);
    let mut pool = decoder.new_pool(1).unwrap();
    let ids = Numbers::new(15).ids(1000, 61);
    decoder.prefill(&ids[..10], &mut pool, 0).unwrap();
    let bytes = |pool: &StatePool| state(&decoder, pool, 0).len() * 4;
    let after_ten = bytes(&pool);
    decoder.absorb(&ids[10..], &mut pool, 0).unwrap();
    for _ in 1..100 {
        decoder.absorb(&ids, &mut pool, 0).unwrap();
    }
    assert_eq!(pool.tokens(0), 100_000);
    assert_eq!(bytes(&pool), after_ten);
    assert_eq!(pool.state_bytes(), after_ten);
    assert_eq!(decoder.config().state_bytes(), after_ten);
    assert!(state(&decoder, &pool, 0).iter().all(|v| v.is_finite()));
}

#[test]
fn an_id_or_slot_that_is_not_there_is_refused_and_changes_nothing() {
    let decoder = decoder("", 16);
    let mut pool = decoder.new_pool(2).unwrap();
    for (ids, slots, word) in
        [(vec![61], vec![0], "61"), (vec![1], vec![2], "slot 2"), (vec![1, 1], vec![0, 0], "twice")]
    {
        let error = decoder.decode(&ids, &mut pool, &slots).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(decoder.prefill(&[], &mut pool, 0).is_err());
    assert!(decoder.new_pool(0).is_err());
    assert!(pool.reset(2).is_err());
    assert!(state(&decoder, &pool, 0).iter().all(|&v| v == 0.0));
    assert_eq!(pool.tokens(0), 0);
}

#[test]
fn the_probe_counts_every_token_of_every_head() {
    let decoder = decoder(KINDS[1], 17);
    let ids = row(&Numbers::new(18).ids(80, 61));
    let mut pool = decoder.new_pool(2).unwrap();
    let mut probe = Vec::new();
    decoder.forward_probed(&ids, &mut pool, &[1], &mut probe).unwrap();
    assert_eq!(probe.len(), 2);
    for layer in &probe {
        assert_eq!((layer.tokens, layer.clamped.len(), layer.log_gate.len()), (80, 2, 2));
        assert!(layer.clamped.iter().all(|&n| n <= 80));
        assert!(layer.log_gate.iter().all(|&g| g < 0.0));
    }
    assert_eq!(pool.denominators(), Denominators::default());
}

#[test]
fn serving_counts_the_clamped_denominators_that_the_probe_counts() {
    let mut most = 0;
    for kind in KINDS {
        let decoder = decoder(kind, 17);
        let ids = Numbers::new(18).ids(80, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let mut probe = Vec::new();
        decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap();
        decoder.absorb(&ids[..50], &mut pool, 0).unwrap();
        ids[50..].iter().for_each(|&id| drop(decoder.decode(&[id], &mut pool, &[0]).unwrap()));
        let probed = probe.iter().flat_map(|layer| &layer.clamped).sum::<u64>();
        assert_eq!(pool.denominators(), Denominators { all: 80 * 2 * 2, clamped: probed }, "{kind}");
        most = most.max(probed);
    }
    assert!(most > 0, "nothing was clamped: the test shows nothing");
}

#[test]
fn threads_and_company_change_no_bit() {
    // Large enough that products and recurrence are shared among threads, which the small decoders never are.
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 64, "#;
    for keys in [r#""proj_dim": 64"#, r#""proj_dim": 64, "feature_map": "favor""#, r#""feature_map": "elu""#] {
        alone_and_together(&tidegate_model::DecoderConfig::from_json(&format!("{text}{keys}}}")).unwrap());
    }
}

fn alone_and_together(config: &tidegate_model::DecoderConfig) {
    let folder = tempfile::tempdir().unwrap();
    crate::common::write_checkpoint(folder.path(), config, 20);
    let decoder = tidegate_model::checkpoint::load(folder.path(), &tidegate_model::Device::Cpu).unwrap();
    let ids = Numbers::new(21).ids(7, 2048);
    let run = |threads: usize, slots: &[usize]| {
        let options = PoolOptions { threads: Threads::new(threads).into(), ..PoolOptions::new(8) };
        let mut pool = decoder.new_pool_with(options).unwrap();
        let steps = (0..3).flat_map(|_| decoder.decode(&ids[..slots.len()], &mut pool, slots).unwrap());
        (steps.collect::<Vec<f32>>(), state(&decoder, &pool, slots[0]))
    };
    let (alone, memory) = run(1, &[5]);
    let company = [5, 0, 7, 2, 1, 6, 3];
    for threads in [1, 2, 3] {
        let (together, same) = run(threads, &company);
        for (step, alone) in alone.chunks_exact(2048).enumerate() {
            let at = step * company.len() * 2048;
            assert_eq!(bits(&together[at..at + 2048]), bits(alone), "{threads} threads, step {step}");
        }
        assert_eq!(bits(&same), bits(&memory), "{threads} threads");
    }
}
