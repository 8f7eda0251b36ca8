//! States of the hybrid that no text has made: whatever is imported into a slot, nothing panics, no other slot's bits
//! change, and a reset leaves nothing of it.

use crate::common::{Numbers, decoder};
use tidegate_model::{Decoder, PoolOptions, StatePool, StateType};

const WINDOW: usize = 20;
/// S (24, 8), z (24) and c of a head.
const SUMS: usize = 24 * 9 + 1;
/// Keys, and values, of a head.
const RING: usize = WINDOW * 8;
const KINDS: [&str; 2] = [
    r#", "attention": "hybrid", "sliding_window": 20"#,
    r#", "attention": "hybrid", "sliding_window": 20, "gate": false"#,
];

/// Changes a head's numbers: (S, z, c, keys, values, gate logits).
type Spoil = fn(&mut [f32]);

const SPOILS: [(&str, Spoil); 11] = [
    ("all are NaN", |head| head.fill(f32::NAN)),
    ("all are infinite", |head| head.fill(f32::INFINITY)),
    ("all are the greatest", |head| head.fill(f32::MAX)),
    ("c is negative", |head| head[SUMS - 1] = -1e30),
    ("c is 0", |head| head[SUMS - 1] = 0.0),
    ("sums are 0", |head| head[..SUMS].fill(0.0)),
    ("sums are not", |head| (0..SUMS).for_each(|i| head[i] = i as f32 - 100.0)),
    ("keys are huge", |head| head[SUMS..SUMS + RING].fill(3e38)),
    ("values are huge", |head| head[SUMS + RING..SUMS + 2 * RING].fill(-3e38)),
    ("gates are open", |head| head[SUMS + 2 * RING..].fill(1e30)),
    ("gates are shut", |head| head[SUMS + 2 * RING..].fill(-1e30)),
];

fn pool(decoder: &Decoder, state: StateType) -> StatePool {
    decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(3) }).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The logits of slots 0 and 2 while the slot between them reads too.
fn steps(decoder: &Decoder, pool: &mut StatePool, ids: &[u32]) -> Vec<u32> {
    let step = |&id: &u32| {
        let logits = decoder.decode(&[id, 60 - id, id], pool, &[0, 1, 2]).unwrap();
        [bits(&logits[..61]), bits(&logits[2 * 61..])].concat()
    };
    ids.iter().flat_map(step).collect()
}

#[test]
fn a_state_that_no_text_made_stays_in_its_slot_and_goes_with_a_reset() {
    let (before, ids) = (Numbers::new(1).ids(33, 61), Numbers::new(2).ids(6, 61));
    for (kind, state) in KINDS.into_iter().flat_map(|kind| [(kind, StateType::F32), (kind, StateType::Bf16)]) {
        let decoder = decoder(kind, 3);
        let mut clean = pool(&decoder, state);
        (0..3).for_each(|slot| decoder.absorb(&before[..11 * (slot + 1)], &mut clean, slot).unwrap());
        let (own, layout) = (clean.export(1).unwrap(), clean.layout());
        let neighbours = [0, 2].map(|slot| clean.export(slot).unwrap());
        let want = steps(&decoder, &mut clean, &ids);
        clean.reset(1).unwrap();
        let fresh = decoder.prefill(&before, &mut clean, 1).unwrap();
        let ends = [0, 1, 2].map(|slot| bits(&clean.export(slot).unwrap()));

        let mut pool = pool(&decoder, state);
        for (name, spoil) in SPOILS {
            for tokens in [1, 19, 20, 21, 1 << 52] {
                let name = format!("{name} after {tokens} tokens, {kind}, {state:?}");
                for (slot, (numbers, tokens)) in [0, 2].into_iter().zip(neighbours.iter().zip([11, 33])) {
                    pool.import(slot, numbers, tokens).unwrap();
                }
                let mut spoilt = own.clone();
                spoilt.chunks_exact_mut(layout.head).for_each(spoil);
                pool.import(1, &spoilt, tokens).unwrap();
                if spoilt.iter().all(|v| v.is_finite()) {
                    assert!(pool.export(1).unwrap().iter().all(|v| v.is_finite()), "{name}");
                }
                assert_eq!(steps(&decoder, &mut pool, &ids), want, "{name}");
                decoder.absorb(&before, &mut pool, 1).unwrap();
                pool.reset(1).unwrap();
                assert!(pool.export(1).unwrap().iter().all(|&v| v.to_bits() == 0), "{name}");
                assert_eq!(bits(&decoder.prefill(&before, &mut pool, 1).unwrap()), bits(&fresh), "{name}");
                for (slot, end) in ends.iter().enumerate() {
                    assert_eq!(&bits(&pool.export(slot).unwrap()), end, "{name}: slot {slot}");
                }
            }
        }
    }
}
