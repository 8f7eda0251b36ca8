//! Tests speculative decoding: a slot that verifies draft tokens and keeps some of them has the same bits as a slot
//! that has read only those tokens, one after another.

use tidegate_model::{Decoder, ModelError, PoolOptions, SlotError, StatePool, StateType, Threads, WeightType};

use crate::common::{Numbers, bits, config, decoder};
use crate::promises::{pool, state, wide_decoders};
use crate::table::{MIXERS, configs};

/// Reads `ids` one after another, and returns the bits of the logits after each.
fn steps(decoder: &Decoder, pool: &mut StatePool, slot: usize, ids: &[u32]) -> Vec<u32> {
    ids.iter().flat_map(|&id| bits(&decoder.decode(&[id], pool, &[slot]).unwrap())).collect()
}

fn verify(decoder: &Decoder, pool: &mut StatePool, slots: &[usize], ids: &[u32]) -> Vec<u32> {
    let mut logits = Vec::new();
    decoder.verify_into(ids, pool, slots, &mut logits).unwrap();
    bits(&logits)
}

/// Slots 0 and 2 verify `drafts` draft tokens; slot 0 keeps `kept` of them and slot 2 keeps one. Slots 1 and 3 read the
/// kept tokens one by one, and must get the same bits. `read`: how many tokens the slots of each pair have read before.
fn check(decoder: &Decoder, kind: StateType, read: [usize; 2], (drafts, kept): (usize, usize), seed: u64) {
    let vocab = decoder.config().vocab_size;
    let name = format!("{kept} of {drafts}, {kind:?}, {}", decoder.config().mixer());
    let mut numbers = Numbers::new(seed);
    let (texts, rows) = (read.map(|read| numbers.ids(read, vocab)), numbers.ids(2 * drafts, vocab));
    let mut pool = pool(decoder, 4, kind);
    for slot in 0..4 {
        if read[slot / 2] > 0 {
            decoder.prefill(&texts[slot / 2], &mut pool, slot).unwrap();
        }
    }
    // The second round continues from the first with fewer drafts; the third has only one slot.
    for (round, (slots, drafts)) in
        [(&[0, 2][..], drafts), (&[0, 2], drafts.min(2)), (&[2], drafts)].into_iter().enumerate()
    {
        let drafted = &rows[..slots.len() * drafts];
        let logits = verify(decoder, &mut pool, slots, drafted);
        let of_rows = || slots.iter().zip(drafted.chunks_exact(drafts));
        let want = of_rows().flat_map(|(&slot, ids)| {
            let other = slot + 1;
            let before = pool.export(other).unwrap();
            let tokens = pool.tokens(other);
            let logits = steps(decoder, &mut pool, other, ids);
            pool.import(other, &before, tokens).unwrap();
            logits
        });
        assert_eq!(logits, want.collect::<Vec<_>>(), "{name}, round {round}");
        // Drafts may be kept in any order of the rows; here the last row is first.
        for (&slot, ids) in of_rows().rev() {
            let count = if slot == 0 { kept.min(drafts) } else { 1 };
            decoder.keep(&mut pool, slot, count).unwrap();
            steps(decoder, &mut pool, slot + 1, &ids[..count]);
            assert_eq!(state(&pool, slot), state(&pool, slot + 1), "{name}, round {round}");
            assert_eq!(pool.tokens(slot), pool.tokens(slot + 1), "{name}");
        }
    }
    // Later tokens get the same bits too.
    let more = numbers.ids(20, vocab);
    for slot in [0, 2] {
        decoder.prefill(&more[..14], &mut pool, slot).unwrap();
        let after = steps(decoder, &mut pool, slot, &more[14..]);
        assert_eq!(after, steps(decoder, &mut pool, slot + 1, &more)[14 * vocab..], "{name}");
        assert_eq!(state(&pool, slot), state(&pool, slot + 1), "{name}");
    }
}

#[test]
fn kept_drafts_have_the_bits_of_single_steps() {
    for (row, name) in configs() {
        let decoder = decoder(name, 5);
        assert_eq!(decoder.speculates(), row.speculates, "{name}");
        if decoder.speculates() {
            for kind in [StateType::F32, StateType::Bf16] {
                // More tokens than a block whose features are computed together; more and fewer than convolution taps.
                for case in [(1, 1), (2, 1), (2, 2), (5, 3), (14, 14)] {
                    check(&decoder, kind, [37, 3], case, 6);
                }
            }
        }
    }
}

#[test]
fn any_number_of_drafts_is_kept_with_weights_of_any_type() {
    let small =
        config(r#", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "proj_dim": 32"#);
    let wide = wide_decoders().filter(|(row, ..)| row.speculates).map(|(_, _, decoder)| decoder.config().clone());
    let cases = wide.map(|config| (config, vec![1, 4, 9])).chain([(small, (1..=9).collect())]);
    for (config, counts) in cases {
        for weights in [WeightType::F32, WeightType::Bf16, WeightType::F16, WeightType::Q8_0, WeightType::Q4_0] {
            let decoder = Decoder::random(config.clone(), weights, 3).unwrap();
            for kind in [StateType::F32, StateType::Bf16] {
                for &kept in &counts {
                    check(&decoder, kind, [5, 0], (9, kept), kept as u64);
                }
            }
        }
    }
}

#[test]
fn threads_change_no_bit_of_drafts() {
    let ids = Numbers::new(4).ids(24, 512);
    for (_, name, decoder) in wide_decoders().filter(|(_, _, decoder)| decoder.speculates()) {
        for kind in [StateType::F32, StateType::Bf16] {
            let run = |threads: usize| {
                let options = PoolOptions { threads: Threads::new(threads).into(), state: kind, ..PoolOptions::new(3) };
                let mut pool = decoder.new_pool_with(options).unwrap();
                let logits = verify(&decoder, &mut pool, &[0, 1, 2], &ids);
                (0..3).for_each(|slot| decoder.keep(&mut pool, slot, 5 + slot).unwrap());
                (logits, [0, 1, 2].map(|slot| state(&pool, slot)))
            };
            let alone = run(1);
            assert!([2, 3].into_iter().all(|threads| run(threads) == alone), "{name}, {kind:?}");
        }
    }
}

fn reason(error: &ModelError) -> Option<SlotError> {
    if let ModelError::Slot { reason, .. } = error { Some(*reason) } else { None }
}

#[test]
fn a_slot_with_drafts_is_refused_until_some_are_kept_or_it_is_reset() {
    for row in MIXERS.iter().filter(|row| row.speculates) {
        let decoder = decoder(row.configs[0], 5);
        let mut pool = decoder.new_pool(3).unwrap();
        decoder.prefill(&[1, 2, 3], &mut pool, 0).unwrap();
        let before = pool.export(0).unwrap();
        assert_eq!(reason(&decoder.keep(&mut pool, 0, 1).unwrap_err()), Some(SlotError::NoDrafts));
        verify(&decoder, &mut pool, &[0, 1], &[4, 5, 6, 7, 8, 9]);
        assert_eq!(reason(&pool.export(0).unwrap_err()), Some(SlotError::Drafted));
        assert_eq!(reason(&decoder.prefill(&[1], &mut pool, 0).unwrap_err()), Some(SlotError::Drafted));
        assert_eq!(reason(&decoder.decode(&[1, 1], &mut pool, &[0, 2]).unwrap_err()), Some(SlotError::Drafted));
        for count in [0, 4] {
            assert!(matches!(decoder.keep(&mut pool, 0, count).unwrap_err(), ModelError::Argument { .. }), "{count}");
        }
        decoder.keep(&mut pool, 0, 2).unwrap();
        assert_eq!(pool.tokens(0), 5);
        assert_eq!(reason(&decoder.keep(&mut pool, 0, 1).unwrap_err()), Some(SlotError::NoDrafts));
        // An import or a reset discards drafts that were not kept.
        pool.import(1, &before, 3).unwrap();
        assert_eq!(reason(&decoder.keep(&mut pool, 1, 1).unwrap_err()), Some(SlotError::NoDrafts));
        assert_eq!(state(&pool, 1), bits(&before));
        verify(&decoder, &mut pool, &[0, 1], &[4, 5]);
        pool.reset(1).unwrap();
        assert!(state(&pool, 1).iter().all(|&bits| bits == 0));
        // Verifying drafts of another slot has overwritten the recorded drafts of slot 0.
        verify(&decoder, &mut pool, &[1], &[4, 5]);
        assert_eq!(reason(&decoder.keep(&mut pool, 0, 1).unwrap_err()), Some(SlotError::NoDrafts));
        pool.reset(0).unwrap();
        decoder.prefill(&[1, 2, 3], &mut pool, 0).unwrap();
        assert_eq!(state(&pool, 0), bits(&before));
    }
}

#[test]
fn a_family_without_drafts_refuses_them_and_changes_nothing() {
    for (_, name) in configs() {
        let decoder = decoder(name, 5);
        if !decoder.speculates() {
            let mut pool = decoder.new_pool(1).unwrap();
            let error = decoder.verify_into(&[1, 2], &mut pool, &[0], &mut Vec::new()).unwrap_err();
            assert!(matches!(error, ModelError::NoSpeculation), "{name}: {error}");
            decoder.prefill(&[1], &mut pool, 0).unwrap();
        }
    }
}
