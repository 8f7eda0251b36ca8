//! RecurrentGemma on candle against Hugging Face's `transformers`.
//!
//! `tests/fixtures-recurrent-gemma` is written by `weights/training/tidegate_training/recurrent_gemma_fixture.py`.

use std::collections::HashMap;

use tidegate_model::candle::{CandlePool, Checkpoint, Config};
use tidegate_model::{Backend, Device, Tensor};

use crate::common::{distance, flat};
use crate::reference::{close, fixture, golden};

const LAYERS: usize = 5;
/// Number of channels of a recurrence.
const LRU: usize = 32;
/// Number of past inputs that a convolution reads.
const TAPS: usize = 3;
/// Number of tokens that attention sees.
const WINDOW: usize = 24;
/// Numbers of a token's keys, of all heads.
const KEYS: usize = 16;

/// Compares a slot that has read `after` tokens with the golden state, relative to the largest number.
fn compare(pool: &CandlePool, after: usize, golden: &HashMap<String, Tensor>) {
    let state = pool.export(0).unwrap();
    let mut rest = &state[..];
    let mut next = |numbers: usize| {
        let (own, others) = rest.split_at(numbers);
        rest = others;
        own
    };
    for layer in 0..LAYERS {
        let golden = |part: &str| golden.get(&format!("{after}.{layer}.{part}")).map(flat);
        let compare = |part: &str, found: &[f32], want: &[f32]| {
            let greatest = want.iter().fold(1.0, |most: f32, v| most.max(v.abs()));
            let error = distance(found, want) / greatest;
            assert!(error < 1e-4, "{part} of layer {layer} after {after} tokens: {error}");
        };
        if let Some(h) = golden("h") {
            compare("h", next(LRU), &h);
            compare("inputs", next(TAPS * LRU), &golden("inputs").unwrap());
            continue;
        }
        for part in ["keys", "values"] {
            let (window, want) = (next(WINDOW * KEYS), golden(part).unwrap());
            let kept = want.len() / KEYS;
            assert_eq!(kept, after.min(WINDOW - 1));
            let rows = (after - kept..after).map(|position| &window[position % WINDOW * KEYS..][..KEYS]);
            compare(part, &rows.collect::<Vec<_>>().concat(), &want);
        }
    }
    assert!(rest.is_empty());
}

/// The last of the texts is much longer than the window.
#[test]
fn logits_and_states_agree_with_transformers() {
    const FIXTURE: &str = "fixtures-recurrent-gemma";
    let (golden, ids) = golden(FIXTURE);
    let checkpoint = Checkpoint::open(&fixture(FIXTURE)).unwrap();
    assert_eq!(checkpoint.config().eos(), [1]);
    let decoder = checkpoint.decoder(&Device::Cpu).unwrap();
    let (mut pool, mut logits, mut read) = (decoder.new_pool(1, 1).unwrap(), Vec::new(), 0);
    for after in [1, 10, 1000] {
        decoder.prefill_logits(&ids[read..after], &mut pool, 0, &mut logits).unwrap();
        let want = flat(&golden[&format!("{after}.logits")]);
        assert!(want.iter().any(|v| v.abs() > 0.5), "the golden logits are nearly constant");
        close(&logits, &want, &format!("logits after {after} tokens"));
        compare(&pool, after, &golden);
        read = after;
    }
}

/// The state of the published model with 2 billion parameters, whose config leaves some keys to the model.
#[test]
fn the_published_model_has_a_state_of_34_megabytes() {
    let config = serde_json::json!({
        "model_type": "recurrent_gemma", "vocab_size": 256_000, "hidden_size": 2560, "intermediate_size": 15_360,
        "num_hidden_layers": 26, "num_attention_heads": 10, "num_key_value_heads": 1, "head_dim": 256, "lru_width": null,
    });
    // 18 layers keep h and three inputs, 8 layers keep 2,048 keys and values.
    let numbers = 18 * 4 * 2560 + 8 * 2 * 2048 * 256;
    assert_eq!(Config::from_json(&config.to_string()).unwrap().state_bytes(), 4 * numbers);
    assert_eq!(4 * numbers / 1_000_000, 34);
}
