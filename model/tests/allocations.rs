//! Checks that a decode step in steady state allocates nothing. The test has a binary of its own because it counts
//! every allocation of the process.

mod common;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tidegate_model::{Decoder, PoolOptions, StateType, Threads, WeightType};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[test]
fn a_token_allocates_nothing() {
    // Wide enough that products, norms and the recurrence are split among the threads. The warm-up fills every window.
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "proj_dim": 64, "position_embedding": "rope""#;
    let around = r#""conv_kernel": 4, "output_norm": true"#;
    let source = r#""encoder_layers": 1, "max_source_positions": 64, "decoder_start_token_id": 0"#;
    let ranks = r#""low_ranks": {"decay": 32, "a": 32, "v": 16, "gate": 64}"#;
    for (kind, more) in [
        (WeightType::Bf16, format!(r#"{around}, "tie_word_embeddings": true"#)),
        (WeightType::Q8_0, around.into()),
        (WeightType::Q8_0, format!(r#"{around}, "feature_map": "favor""#)),
        (WeightType::Bf16, format!(r#"{around}, "attention": "hybrid", "sliding_window": 64"#)),
        (WeightType::Bf16, format!(r#"{source}, "conv_kernel": 4, "cross_proj_dim": 96"#)),
        (WeightType::Q8_0, format!(r#"{source}, "attention": "softmax", "sliding_window": 64"#)),
        (WeightType::Q8_0, ranks.into()),
        (WeightType::Q8_0, r#""state_size": 64, "n_groups": 2"#.into()),
    ] {
        let text = if more.contains("encoder") { text.replace("rfa_gate", "rfa_seq2seq") } else { text.into() };
        let text = if more.contains("rank") { text.replace("rfa_gate", "rwkv7").replace("rope", "none") } else { text };
        let text = if more.contains("state_size") {
            text.replace("rfa_gate", "mamba2")
                .replace("rope", "none")
                .replace(r#""num_attention_heads": 4"#, r#""num_attention_heads": 8"#)
        } else {
            text
        };
        let config = tidegate_model::DecoderConfig::from_json(&format!("{text}, {more}}}")).unwrap();
        let decoder = Decoder::random(config, kind, 1).unwrap();
        for (rows, state) in [(1, StateType::F32), (16, StateType::F32), (16, StateType::Bf16)] {
            let options = PoolOptions { slots: 16, threads: Threads::new(2).into(), state };
            let mut pool = decoder.new_pool_with(options).unwrap();
            let (ids, slots) = (common::Numbers::new(2).ids(rows, 512), (0..rows).collect::<Vec<_>>());
            let mut logits = Vec::new();
            if decoder.config().source().is_some() {
                for &slot in &slots {
                    decoder.read_source(&[1; 40], &mut pool, slot).unwrap();
                }
            }
            let drafts = if decoder.speculates() { common::Numbers::new(3).ids(3 * rows, 512) } else { Vec::new() };
            let mut step = || {
                decoder.decode_into(&ids, &mut pool, &slots, &mut logits).unwrap();
                if !drafts.is_empty() {
                    decoder.verify_into(&drafts, &mut pool, &slots, &mut logits).unwrap();
                    for &slot in &slots {
                        decoder.keep(&mut pool, slot, 2).unwrap();
                    }
                }
            };
            // A thread allocates its own buffer when it first gets a piece of work, which may take many steps.
            (0..200).for_each(|_| step());
            let region = Region::new(ALLOCATOR);
            (0..100).for_each(|_| step());
            let stats = region.change();
            assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{kind}, {rows} rows: {stats:?}");
        }
    }
}
