//! Tests decoders of softmax attention: the window, the probe, and the tensors.

use tidegate_model::probe::{LayerProbe, Probe};
use tidegate_model::{DecoderConfig, Denominators, checkpoint};

use crate::common::{Numbers, bits, config, decoder, distance, flat, row, written};
use crate::table::MIXERS;

#[test]
fn only_the_last_tokens_of_the_window_count() {
    // Only one layer, because the inputs of a deeper layer depend on tokens before its window.
    let config = DecoderConfig { num_hidden_layers: 1, ..config(r#", "attention": "softmax", "sliding_window": 40"#) };
    let decoder = written(&config, 5);
    let ids = Numbers::new(6).ids(333, 61);
    let mut pool = decoder.new_pool(2).unwrap();
    let long = decoder.prefill_logits(&ids, &mut pool, 0).unwrap();
    let last = decoder.prefill_logits(&ids[333 - 40..], &mut pool, 1).unwrap();
    let error = distance(&long, &last);
    // Products of rotated queries and keys depend only on distances, but are rounded differently at other positions.
    assert!(error < 1e-4, "{error}");
    pool.reset(1).unwrap();
    let other = decoder.prefill_logits(&ids[333 - 39..], &mut pool, 1).unwrap();
    assert!(distance(&long, &other) > 1e-3, "the first token of the window has no weight, so the test shows nothing");
}

#[test]
fn the_probe_stays_empty_and_nothing_is_clamped() {
    let decoder = decoder(MIXERS[1].configs[1], 17);
    let ids = Numbers::new(18).ids(80, 61);
    let mut pool = decoder.new_pool(2).unwrap();
    let mut probe = Probe::new();
    let probed = flat(&decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap());
    assert_eq!(probe, vec![LayerProbe::default(); 2]);
    assert_eq!(pool.denominators(), Denominators::default());
    assert_eq!(bits(&probed), bits(&flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap())));
}

#[test]
fn a_checkpoint_of_softmax_has_only_its_own_tensors() {
    let names: Vec<String> = checkpoint::tensors(&config(MIXERS[1].configs[0])).into_keys().collect();
    assert!(names.iter().any(|name| name.ends_with("self_attn.o_proj.weight")));
    for part in ["gate.weight", "gate.bias", "sigma", "random_matrices"] {
        assert!(!names.iter().any(|name| name.ends_with(&format!("self_attn.{part}"))), "{part}");
    }
}
