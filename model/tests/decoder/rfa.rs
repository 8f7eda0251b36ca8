//! Tests decoders of random feature attention: the chunked form, the maxima of keys, and the counts of denominators.

use crate::common::{Numbers, bits, decoder, distance, flat, row};
use tidegate_model::Denominators;
use tidegate_model::Tensor;
use tidegate_model::probe::Probe;

use crate::table::MIXERS;

#[test]
fn the_chunked_form_agrees_with_the_serving_form() {
    for &kind in MIXERS[0].configs {
        let decoder = decoder(kind, 3);
        let ids = Numbers::new(4).ids(150, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let served = flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap());
        let mut probe = Probe::default();
        let chunked = flat(&decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap());
        assert!(distance(&served, &chunked) < 1e-4, "{kind}: {}", distance(&served, &chunked));
        // Without a gate, the sums grow with the text, and their rounding errors with them, so the error is relative.
        let (served, chunked) = (pool.export(0).unwrap(), pool.export(1).unwrap());
        let error = served.iter().zip(&chunked).map(|(a, b)| (a - b).abs() / a.abs().max(1.0)).fold(0.0, f32::max);
        assert!(error < 1e-4 && chunked.iter().all(|v| v.is_finite()), "{kind}: {error}");
    }
}

#[test]
fn an_impossible_maximum_is_refused_and_a_low_one_only_forgets() {
    let decoder = decoder(r#", "feature_map": "favor""#, 17);
    let ids = Numbers::new(18).ids(20, 61);
    let mut pool = decoder.new_pool(2).unwrap();
    decoder.prefill(&ids, &mut pool, 0).unwrap();
    let numbers = pool.export(0).unwrap();
    let (head, greatest) = (pool.layout().head, decoder.greatest_maxima());
    assert_eq!(greatest.len(), numbers.len() / head);
    assert!(numbers.chunks_exact(head).zip(&greatest).all(|(head, &most)| head[head.len() - 1] <= most));
    // Sets the maximum of the third head.
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
    // The maximum of an empty head has no effect.
    for maximum in [greatest[2], -90.0, f32::MIN] {
        assert_eq!(bits(&read(&with(&vec![0.0; numbers.len()], maximum))), bits(&fresh), "{maximum}");
    }
    // If the maximum is this low, the next key leaves nothing of the old state.
    for low in [-1e30, f32::MIN] {
        let mut foreign = numbers.clone();
        foreign.iter_mut().skip(head - 1).step_by(head).for_each(|maximum| *maximum = low);
        assert_eq!(bits(&read(&foreign)), bits(&fresh), "{low}");
    }
    assert_ne!(bits(&read(&numbers)), bits(&fresh));
}

#[test]
fn a_batched_prefill_equals_each_row_alone() {
    let decoder = decoder(MIXERS[0].configs[1], 9);
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
fn an_id_or_slot_out_of_range_is_refused_and_changes_nothing() {
    let decoder = decoder("", 16);
    let mut pool = decoder.new_pool(2).unwrap();
    for (ids, slots, word) in
        [(vec![61], vec![0], "61"), (vec![1], vec![2], "slot 2"), (vec![1, 1], vec![0, 0], "twice")]
    {
        let error = decoder.decode(&ids, &mut pool, &slots).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    assert!(decoder.prefill_logits(&[], &mut pool, 0).is_err());
    assert!(decoder.new_pool(0).is_err());
    assert!(pool.reset(2).is_err());
    assert!(pool.export(0).unwrap().iter().all(|&v| v == 0.0));
    assert_eq!(pool.tokens(0), 0);
}

#[test]
fn the_probe_counts_every_token_of_every_head() {
    let decoder = decoder(MIXERS[0].configs[1], 17);
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
    for &kind in MIXERS[0].configs {
        let decoder = decoder(kind, 17);
        let ids = Numbers::new(18).ids(80, 61);
        let mut pool = decoder.new_pool(2).unwrap();
        let mut probe = Vec::new();
        decoder.forward_probed(&row(&ids), &mut pool, &[1], &mut probe).unwrap();
        decoder.prefill(&ids[..50], &mut pool, 0).unwrap();
        ids[50..].iter().for_each(|&id| drop(decoder.decode(&[id], &mut pool, &[0]).unwrap()));
        let probed = probe.iter().flat_map(|layer| &layer.clamped).sum::<u64>();
        assert_eq!(pool.denominators(), Denominators { all: 80 * 2 * 2, clamped: probed }, "{kind}");
        most = most.max(probed);
    }
    assert!(most > 0, "no denominator was clamped, so the test shows nothing");
}
