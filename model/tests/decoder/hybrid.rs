//! Tests decoders of the hybrid mixer: the counts of denominators, and the tensors.

use crate::common::{Numbers, bits, config, decoder, flat, row};
use crate::table::MIXERS;
use tidegate_model::probe::Probe;
use tidegate_model::{Decoder, Denominators, WeightType, checkpoint};

#[test]
fn denominators_of_the_far_part_are_counted_and_the_probe_changes_no_bit() {
    let mut most = 0;
    for (kind, window) in MIXERS[2].configs.iter().zip([1, 40, 70, 300]) {
        let decoder = decoder(kind, 17);
        let ids = Numbers::new(18).ids(320, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let mut probe = Probe::new();
        let probed = flat(&decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap());
        assert_eq!(pool.denominators(), Denominators::default());
        decoder.prefill(&ids[..310], &mut pool, 0).unwrap();
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
    assert!(most > 0, "no denominator was clamped, so the test shows nothing");
}

#[test]
fn a_checkpoint_has_the_tensors_of_both_parts_and_a_bias() {
    for (kind, gate) in [(MIXERS[2].configs[1], true), (MIXERS[2].configs[2], false)] {
        let tensors = checkpoint::tensors(&config(kind));
        let at = |part: &str| tensors.get(&format!("model.layers.1.self_attn.{part}"));
        assert_eq!(at("far_bias"), Some(&vec![2]));
        assert!(["sigma", "random_matrices", "o_proj.weight"].into_iter().all(|part| at(part).is_some()));
        assert_eq!((at("gate.weight").is_some(), at("gate.bias").is_some()), (gate, gate));
        let random = Decoder::random(config(kind), WeightType::F32, 1).unwrap();
        let logits = random.prefill_logits(&Numbers::new(1).ids(100, 61), &mut random.new_pool(1).unwrap(), 0).unwrap();
        assert!(logits.iter().all(|v| v.is_finite()) && logits.iter().any(|v| v.abs() > 0.1));
    }
}
