//! A step in steady state allocates nothing. Alone in its binary: it counts every allocation of the process.

mod common;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tidegate_model::{Decoder, PoolOptions, StateType, Threads, WeightType};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

#[test]
fn a_token_allocates_nothing() {
    // Wide enough that products, norms and recurrence are shared among the threads; the windows are full long before.
    let text = r#"{"model_type": "rfa_gate", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "proj_dim": 64, "conv_kernel": 4, "output_norm": true,
        "position_embedding": "rope""#;
    for (kind, end) in [
        (WeightType::Bf16, r#", "tie_word_embeddings": true}"#),
        (WeightType::Q8_0, "}"),
        (WeightType::Q8_0, r#", "feature_map": "favor"}"#),
        (WeightType::Bf16, r#", "attention": "hybrid", "sliding_window": 64}"#),
    ] {
        let config = tidegate_model::DecoderConfig::from_json(&format!("{text}{end}")).unwrap();
        let decoder = Decoder::random(config, kind, 1).unwrap();
        for (rows, state) in [(1, StateType::F32), (16, StateType::F32), (16, StateType::Bf16)] {
            let options = PoolOptions { slots: 16, threads: Threads::new(2).into(), state };
            let mut pool = decoder.new_pool_with(options).unwrap();
            let (ids, slots) = (common::Numbers::new(2).ids(rows, 512), (0..rows).collect::<Vec<_>>());
            let mut logits = Vec::new();
            // Every thread makes its own buffer at its first piece, whenever that is.
            for _ in 0..200 {
                decoder.decode_into(&ids, &mut pool, &slots, &mut logits).unwrap();
            }
            let region = Region::new(ALLOCATOR);
            for _ in 0..100 {
                decoder.decode_into(&ids, &mut pool, &slots, &mut logits).unwrap();
            }
            let stats = region.change();
            assert_eq!((stats.allocations, stats.reallocations), (0, 0), "{kind}, {rows} rows: {stats:?}");
        }
    }
}
