//! Tests properties of every mixer: the bits of a text depend on the text alone, not on how it is divided into calls,
//! the rest of the batch, the number of threads, the slot or the pool.

use tidegate_model::{Decoder, DecoderConfig, ModelError, PoolOptions, StatePool, StateType, Threads};

use crate::common::{Numbers, bits, config, decoder, distance, flat, row, written};
use crate::table::{Hostile, MIXERS, Row, configs};

/// Returns the bits of a slot's state.
pub(crate) fn state(pool: &StatePool, slot: usize) -> Vec<u32> {
    bits(&pool.export(slot).unwrap())
}

pub(crate) fn pool(decoder: &Decoder, slots: usize, state: StateType) -> StatePool {
    decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(slots) }).unwrap()
}

const TYPES: [StateType; 2] = [StateType::F32, StateType::Bf16];

#[test]
fn a_text_in_any_pieces_has_the_bits_of_one_forward_pass() {
    for (mixer, name) in configs() {
        let decoder = decoder(name, 3);
        for kind in TYPES {
            let ids = Numbers::new(4).ids(mixer.tokens, 61);
            let mut pool = pool(&decoder, 3, kind);
            let whole = flat(&decoder.forward(&row(&ids), &mut pool, &[0]).unwrap());
            let steps: Vec<f32> = ids.iter().flat_map(|&id| decoder.decode(&[id], &mut pool, &[1]).unwrap()).collect();
            assert!(whole.iter().any(|v| v.abs() > 0.1), "{name}: the logits are nearly constant");
            assert_eq!(bits(&whole), bits(&steps), "{name}");
            assert_eq!(state(&pool, 0), state(&pool, 1), "{name}");
            for &cut in mixer.cuts {
                pool.reset(2).unwrap();
                decoder.prefill(&ids[..cut], &mut pool, 2).unwrap();
                let last = decoder.prefill_logits(&ids[cut..], &mut pool, 2).unwrap();
                assert_eq!(bits(&last), bits(&whole[whole.len() - 61..]), "{name}, cut at {cut}");
                assert_eq!(state(&pool, 2), state(&pool, 0), "{name}, cut at {cut}");
                assert_eq!(pool.tokens(2), mixer.tokens as u64);
            }
        }
    }
}

#[test]
fn a_state_continues_in_another_pool_and_a_reused_slot_shows_nothing() {
    for (mixer, name) in configs() {
        let decoder = decoder(name, 17);
        for kind in TYPES {
            let ids = Numbers::new(18).ids(mixer.tokens, 61);
            let (mut here, mut there) = (pool(&decoder, 2, kind), pool(&decoder, 3, kind));
            decoder.prefill(&ids[..33], &mut there, 0).unwrap();
            let beside = state(&there, 0);
            for read in [30, mixer.tokens / 2, mixer.tokens - 30] {
                here.reset(1).unwrap();
                decoder.prefill(&ids[..read], &mut here, 1).unwrap();
                let numbers = here.export(1).unwrap();
                assert_eq!(numbers.len(), here.layout().numbers());
                assert_eq!(numbers.len() * 4, decoder.config().state_bytes());
                decoder.prefill(&ids[..read + 29], &mut there, 2).unwrap();
                there.import(2, &numbers, read as u64).unwrap();
                assert_eq!((bits(&numbers), there.tokens(2)), (state(&there, 2), read as u64), "{name}");
                let stayed = decoder.prefill_logits(&ids[read..], &mut here, 1).unwrap();
                let moved = decoder.prefill_logits(&ids[read..], &mut there, 2).unwrap();
                assert_eq!(bits(&stayed), bits(&moved), "{name}: {read} tokens");
                let error = there.import(2, &numbers[1..], 70).unwrap_err();
                assert!(matches!(error, ModelError::Argument { .. }), "{error}");
            }
            assert_eq!(state(&there, 0), beside, "{name}: a neighbour has changed");
            here.reset(1).unwrap();
            assert!(here.export(1).unwrap().iter().all(|&v| v == 0.0) && here.tokens(1) == 0);
            let fresh = decoder.prefill_logits(&ids, &mut here, 0).unwrap();
            assert_eq!(bits(&decoder.prefill_logits(&ids, &mut here, 1).unwrap()), bits(&fresh), "{name}");
        }
    }
}

/// Prompts of different lengths in scattered slots take twenty steps together; then each does so alone.
#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch_and_slot() {
    for (mixer, name) in configs() {
        let (decoder, mut numbers) = (decoder(name, 7), Numbers::new(8));
        let prompts = [1, mixer.tokens - 10, 3, 33, mixer.tokens * 2 / 3].map(|len| numbers.ids(len, 61));
        let steps: Vec<Vec<u32>> = (0..20).map(|_| numbers.ids(prompts.len(), 61)).collect();
        let slots = [6, 0, 3, 7, 2];
        let mut pool = decoder.new_pool(8).unwrap();
        for (prompt, &slot) in prompts.iter().zip(&slots) {
            decoder.prefill_logits(prompt, &mut pool, slot).unwrap();
        }
        let together: Vec<Vec<f32>> = steps.iter().map(|ids| decoder.decode(ids, &mut pool, &slots).unwrap()).collect();
        for (i, prompt) in prompts.iter().enumerate() {
            let mut alone = decoder.new_pool(1).unwrap();
            decoder.prefill_logits(prompt, &mut alone, 0).unwrap();
            for (ids, together) in steps.iter().zip(&together) {
                let logits = decoder.decode(&ids[i..=i], &mut alone, &[0]).unwrap();
                assert_eq!(bits(&logits), bits(&together[i * 61..][..61]), "{name}: row {i}");
            }
            assert_eq!(state(&alone, 0), state(&pool, slots[i]), "{name}: row {i}");
        }
    }
}

/// Reads a long text and its beginning, then takes steps in their slots and in empty ones, on one thread or several.
#[test]
fn threads_change_no_bit() {
    for (mixer, extra, decoder) in wide_decoders() {
        let ids = Numbers::new(21).ids(mixer.tokens + 300, 512);
        for state_type in TYPES {
            let run = |threads: usize| {
                let threads = Threads::new(threads).into();
                let options = PoolOptions { threads, state: state_type, ..PoolOptions::new(8) };
                let mut pool = decoder.new_pool_with(options).unwrap();
                decoder.prefill(&ids[..mixer.tokens], &mut pool, 0).unwrap();
                decoder.prefill(&ids, &mut pool, 2).unwrap();
                let slots = [5, 0, 7, 2, 1, 6, 3];
                let steps = (0..30).flat_map(|i| decoder.decode(&ids[i..i + 7], &mut pool, &slots).unwrap());
                (bits(&steps.collect::<Vec<f32>>()), slots.map(|slot| state(&pool, slot)))
            };
            let alone = run(1);
            assert!([2, 3].into_iter().all(|threads| run(threads) == alone), "{extra}");
        }
    }
}

/// Returns decoders so large that a step is split among threads.
pub(crate) fn wide_decoders() -> impl Iterator<Item = (&'static Row, &'static str, Decoder)> {
    let large = r#", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "head_dim": 64"#;
    let configs = MIXERS.iter().flat_map(|mixer| mixer.wide.iter().map(move |&extra| (mixer, extra)));
    configs.map(move |(mixer, extra)| (mixer, extra, written(&wide(large, extra), 20)))
}

/// Returns a config with the keys of both lists; the second list overrides the first.
fn wide(large: &str, extra: &str) -> DecoderConfig {
    let keys = |text: &str| -> serde_json::Map<String, serde_json::Value> {
        serde_json::from_str(&format!("{{{}}}", text.trim_start_matches(','))).unwrap()
    };
    let mut all = keys(large);
    all.extend(keys(extra));
    let text = serde_json::to_string(&all).unwrap();
    config(&format!(", {}", &text[1..text.len() - 1]))
}

#[test]
fn bf16_states_give_nearly_the_same_logits() {
    for (_, name) in configs() {
        let decoder = decoder(name, 7);
        let ids = Numbers::new(8).ids(400, 61);
        let (mut half, mut full) = (pool(&decoder, 1, StateType::Bf16), pool(&decoder, 1, StateType::F32));
        let want = decoder.prefill_logits(&ids, &mut full, 0).unwrap();
        let error = distance(&decoder.prefill_logits(&ids, &mut half, 0).unwrap(), &want);
        // Without a gate, the sums grow with the text, and so does the rounding error of each token. In RWKV-7 and
        // Mamba-2, a norm scales up small readouts along with their rounding errors.
        let config = decoder.config();
        let ungated = config.features() > 0 && !config.gate;
        let normed = config.low_ranks.is_some() || config.state_space.is_some();
        let bound = if ungated || normed { 0.2 } else { 0.05 };
        assert!(error > 0.0 && error < bound, "{name}: {error}");
        assert!(half.state_bytes() < full.state_bytes() * 7 / 10, "{name}");
    }
}

#[test]
fn state_bytes_do_not_depend_on_the_text() {
    for (_, name) in configs() {
        let decoder = decoder(name, 14);
        let mut pool = decoder.new_pool(1).unwrap();
        let ids = Numbers::new(15).ids(1000, 61);
        let bytes = pool.state_bytes();
        (0..10).for_each(|_| decoder.prefill(&ids, &mut pool, 0).unwrap());
        assert_eq!((pool.tokens(0), pool.state_bytes()), (10_000, bytes), "{name}");
        let numbers = pool.export(0).unwrap();
        assert_eq!(numbers.len() * 4, decoder.config().state_bytes(), "{name}");
        assert!(numbers.iter().all(|v| v.is_finite()), "{name}");
    }
}

/// Changed states that every mixer must survive.
const HOSTILE: [Hostile; 7] = [
    ("all are NaN", |head| head.fill(f32::NAN)),
    ("all are infinite", |head| head.fill(f32::INFINITY)),
    ("all are the largest", |head| head.fill(f32::MAX)),
    ("all are 0", |head| head.fill(0.0)),
    ("the first half is huge", |head| head.split_at_mut(head.len() / 2).0.fill(3e38)),
    ("the second half is huge", |head| head.split_at_mut(head.len() / 2).1.fill(-3e38)),
    ("the last number is huge", |head| head.iter_mut().last().into_iter().for_each(|last| *last = 1e30)),
];

/// Reads `ids` in slots 0 and 2, and other tokens in slot 1, in one batch. Returns the logits of slots 0 and 2.
fn steps(decoder: &Decoder, pool: &mut StatePool, ids: &[u32]) -> Vec<u32> {
    let step = |&id: &u32| {
        let logits = decoder.decode(&[id, 60 - id, id], pool, &[0, 1, 2]).unwrap();
        [bits(&logits[..61]), bits(&logits[2 * 61..])].concat()
    };
    ids.iter().flat_map(step).collect()
}

/// No import panics or changes another slot's bits, and a reset removes the imported state.
#[test]
fn an_impossible_state_is_refused_or_affects_only_its_slot_until_a_reset() {
    let (before, ids) = (Numbers::new(1).ids(33, 61), Numbers::new(2).ids(6, 61));
    for ((mixer, config), kind) in configs().flat_map(|case| TYPES.map(|kind| (case, kind))) {
        let decoder = decoder(config, 3);
        let mut clean = pool(&decoder, 3, kind);
        (0..3).for_each(|slot| decoder.prefill(&before[..11 * (slot + 1)], &mut clean, slot).unwrap());
        let (own, layout) = (clean.export(1).unwrap(), clean.layout());
        let neighbours = [0, 2].map(|slot| clean.export(slot).unwrap());
        let want = steps(&decoder, &mut clean, &ids);
        clean.reset(1).unwrap();
        let fresh = decoder.prefill_logits(&before, &mut clean, 1).unwrap();
        let ends = [0, 1, 2].map(|slot| state(&clean, slot));
        let mut pool = pool(&decoder, 3, kind);
        for (name, change) in HOSTILE.iter().chain(mixer.hostile) {
            for tokens in [1, 39, 40, 41, 1 << 52] {
                let name = format!("{name} after {tokens} tokens, {config}, {kind:?}");
                for (slot, (numbers, tokens)) in [0, 2].into_iter().zip(neighbours.iter().zip([11, 33])) {
                    pool.import(slot, numbers, tokens).unwrap();
                }
                pool.import(1, &own, 22).unwrap();
                let mut hostile = own.clone();
                hostile[..layout.memory()].chunks_exact_mut(layout.head).for_each(change);
                match pool.import(1, &hostile, tokens) {
                    Ok(()) => {
                        let finite = hostile.iter().all(|v| v.is_finite());
                        assert!(!finite || pool.export(1).unwrap().iter().all(|v| v.is_finite()), "{name}");
                    }
                    Err(error) => {
                        assert!(matches!(error, ModelError::Argument { .. }), "{name}: {error}");
                        assert_eq!(state(&pool, 1), bits(&own), "{name}: a refused state was written");
                    }
                }
                assert_eq!(steps(&decoder, &mut pool, &ids), want, "{name}");
                decoder.prefill(&before, &mut pool, 1).unwrap();
                pool.reset(1).unwrap();
                assert!(state(&pool, 1).iter().all(|&bits| bits == 0), "{name}");
                assert_eq!(bits(&decoder.prefill_logits(&before, &mut pool, 1).unwrap()), bits(&fresh), "{name}");
                for (slot, end) in ends.iter().enumerate() {
                    assert_eq!(&state(&pool, slot), end, "{name}: slot {slot}");
                }
            }
        }
    }
}
