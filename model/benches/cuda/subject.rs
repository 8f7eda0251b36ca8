//! What is measured: a decoder of 1.3 billion or of 125 million weights, or one small enough for the emulator.

use serde_json::{Value, json};
use tidegate_model::DecoderConfig;

use super::Result;

pub(super) struct Subject {
    pub(super) name: &'static str,
    pub(super) config: DecoderConfig,
    /// Rows of a decode step, in ascending order.
    pub(super) batches: &'static [usize],
    /// Batches whose kernels are measured one by one.
    pub(super) taken_apart: &'static [usize],
    /// Tokens of a prompt, and of one chunk.
    pub(super) prompt: (usize, usize),
    /// A great depth, set without reading a text.
    pub(super) deep: u64,
    /// The comparison with softmax attention: rows, and tokens that each has read.
    pub(super) beside: (usize, &'static [u64]),
    /// Conversations at once, and how many of them are in a step.
    pub(super) sessions: (usize, &'static [usize]),
    /// Bytes of a copy.
    pub(super) copied: usize,
    pub(super) rounds: usize,
}

impl Subject {
    /// shape: 1.3b or 125m
    pub(super) fn new(shape: &str, emulated: bool) -> Result<Self> {
        let config = |layers: usize, hidden: usize, heads: usize, intermediate: usize, vocab: usize| {
            // As in `tidegate bench --shape`: the embedding is tied to the head.
            let config = json!({"model_type": "rfa_gate", "vocab_size": vocab, "hidden_size": hidden,
                "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
                "head_dim": hidden / heads, "proj_dim": hidden / heads, "tie_word_embeddings": true});
            DecoderConfig::from_json(&config.to_string())
        };
        Ok(if emulated {
            Self {
                name: "emulated",
                config: config(2, 64, 2, 96, 61)?,
                batches: &[1, 4, 34],
                taken_apart: &[1, 34],
                prompt: (40, 20),
                deep: 1_000_000,
                beside: (4, &[8, 16]),
                sessions: (20, &[8]),
                copied: 1 << 16,
                rounds: 2,
            }
        } else {
            let (name, config) = match shape {
                "1.3b" => ("1.3b", config(24, 2048, 32, 5504, 32_000)?),
                "125m" => ("125m", config(12, 768, 12, 2048, 32_000)?),
                other => return Err(format!("--shape: must be 1.3b or 125m, found {other}").into()),
            };
            Self {
                name,
                config,
                batches: &[1, 4, 16, 64, 256],
                taken_apart: &[1, 16, 256],
                prompt: (8192, 1024),
                deep: 1_000_000,
                beside: (16, &[512, 1024, 2048, 4096, 8192, 16_384, 32_768]),
                sessions: (10_000, &[256, 512]),
                copied: 1 << 30,
                rounds: 5,
            }
        })
    }

    /// The most rows of a step.
    pub(super) fn rows(&self) -> usize {
        self.batches.iter().copied().max().unwrap_or(1)
    }

    /// Operations of one token's products in the blocks: two for each weight.
    pub(super) fn operations(&self) -> usize {
        let of = &self.config;
        let (hidden, inner) = (of.hidden_size, of.inner_size());
        2 * of.num_hidden_layers
            * (4 * hidden * inner + 3 * hidden * of.intermediate_size + hidden * of.num_attention_heads)
    }

    /// The shape, in the format of softmax.py.
    pub(super) fn of_softmax(&self) -> Value {
        let of = &self.config;
        let (batch, lengths) = self.beside;
        json!({"layers": of.num_hidden_layers, "hidden": of.hidden_size, "heads": of.num_attention_heads,
            "intermediate": of.intermediate_size, "vocabulary": of.vocab_size, "batch": batch, "lengths": lengths,
            "prompt": self.prompt.0, "device": if self.name == "emulated" { "cpu" } else { "cuda" }})
    }

    /// Token ids of a text without a pattern, from a position on.
    pub(super) fn ids(&self, from: usize, count: usize) -> Vec<u32> {
        ids(from, count, self.config.vocab_size)
    }
}

/// As [`Subject::ids`], for any vocabulary.
pub(super) fn ids(from: usize, count: usize, vocab: usize) -> Vec<u32> {
    let id = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocab as u64;
    (from..from + count).map(|i| id(i) as u32).collect()
}
