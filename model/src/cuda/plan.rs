//! The memory that a pool needs on the device, computed before anything is allocated.

use super::ops::Inputs;
use crate::config::DecoderConfig;
use crate::layout::StateLayout;
use crate::memory::StateType;
use crate::sampling::ROW_WORDS;

/// The most tokens of a prompt that are read at a time.
pub(super) const PREFILL: usize = 1024;

/// The most rows of a step; more rows take several steps. Bounds the buffers on the device and on the host.
pub(super) const ROWS: usize = 1024;

/// Bytes before the sampled tokens, and bytes per row: a token, and whether any token was possible.
pub(super) const OUTPUT_HEAD: usize = 16;
pub(super) const CHOICE_BYTES: usize = 8;

/// Biases and penalties that fit per row; a step's rows share the space, and one row may use all of it.
const ROW_EDITS: usize = 1024;

/// Returns the 32-bit words for the lists of a step's sampling plans: a mask, biases and penalties for each row, and,
/// in case there are few rows, for each token.
pub(super) fn choice_words(vocab: usize, rows: usize) -> usize {
    rows * (vocab.div_ceil(32) + 2 * ROW_EDITS) + 2 * vocab
}

/// The sizes of a step's buffers in a pool.
pub(super) struct Plan {
    pub(super) tokens: usize,
    pub(super) numbers: [usize; 6], // of x, qkv, convolved, gate, phi, sums: f32
    pub(super) input: usize,
    /// Bytes before the logits.
    pub(super) head: usize,
    pub(super) output: usize,
    pub(super) rows: usize,
}

impl Plan {
    pub(super) fn new(config: &DecoderConfig, slots: usize) -> Self {
        let rows = slots.min(ROWS).next_power_of_two();
        let tokens = rows.max(PREFILL);
        let (hidden, inner, heads) = (config.hidden_size, config.inner_size(), config.num_attention_heads);
        let convolved = if config.conv_kernel > 0 || config.output_norm { tokens * 3 * inner } else { 0 };
        let gate = if config.gate { tokens * heads } else { 0 };
        let head = OUTPUT_HEAD + (rows * CHOICE_BYTES).next_multiple_of(OUTPUT_HEAD);
        let (phi, sums) = (PREFILL * heads * 2 * config.features(), heads * (config.features() + 1));
        Self {
            tokens,
            numbers: [tokens * hidden, tokens * 3 * inner, convolved, gate, phi, sums],
            input: input_bytes(rows, tokens, config.head_dim),
            head,
            output: head + rows * config.vocab_size * size_of::<f32>(),
            rows,
        }
    }

    fn bytes(&self, config: &DecoderConfig) -> usize {
        let widths = [config.hidden_size, config.inner_size(), config.intermediate_size];
        let inputs: usize = widths.iter().map(|&columns| Inputs::bytes(self.tokens, columns)).sum();
        let choices = (choice_words(config.vocab_size, self.rows) + self.rows * ROW_WORDS) * size_of::<u32>();
        self.numbers.iter().sum::<usize>() * size_of::<f32>() + inputs + self.input + self.output + choices
    }
}

/// Returns the most slots, up to `most`, that fit into `bytes` bytes with the buffers of their steps; at least 1.
pub(super) fn fitting(config: &DecoderConfig, state: StateType, bytes: usize, most: usize) -> usize {
    let one = slot_bytes(config.state_layout(), config.features(), config.head_dim, state);
    let left = bytes.saturating_sub(Plan::new(config, most).bytes(config));
    (left / one).clamp(1, most.max(1))
}

/// Returns the rows of S for each of the sixteen threads of a column: a number that kernels are compiled for.
pub(super) fn rows_of_a_thread(features: usize) -> usize {
    features.div_ceil(16).next_power_of_two().max(2)
}

/// Returns the length of a column of S on the device: the number of features, padded.
pub(super) fn column(features: usize) -> usize {
    16 * rows_of_a_thread(features)
}

/// Returns the bytes of a step's inputs.
pub(super) fn input_bytes(rows: usize, tokens: usize, head_dim: usize) -> usize {
    rows * (size_of::<u64>() + size_of::<u32>()) + tokens * (size_of::<u32>() + head_dim * size_of::<f32>())
}

/// Returns the bytes of a number of S.
pub(super) fn width(state: StateType) -> usize {
    match state {
        StateType::F32 => 4,
        StateType::Bf16 => 2,
    }
}

pub(super) fn slot_bytes(layout: StateLayout, features: usize, head_dim: usize, state: StateType) -> usize {
    let heads = layout.layers * layout.heads;
    // Everything but S is f32: z, c, and the convolutions' inputs.
    let beside = heads * (features + 1) + layout.conv();
    heads * head_dim * column(features) * width(state) + beside * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_slots_as_fit_beside_the_buffers_of_their_steps() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12, "conv_kernel": 3}"#;
        let config = DecoderConfig::from_json(text).unwrap();
        for state in [StateType::F32, StateType::Bf16] {
            let one = slot_bytes(config.state_layout(), config.features(), config.head_dim, state);
            // As bf16, S takes half; z, c and the convolution's inputs stay f32; columns of 24 numbers take 32.
            let s = 2 * 2 * 8 * 4;
            assert_eq!(one, config.state_bytes() + 8 * s - if state == StateType::Bf16 { 32 * s / 2 } else { 0 });
            let held = Plan::new(&config, 5000).bytes(&config);
            assert_eq!(fitting(&config, state, held + 700 * one, 5000), 700);
            assert_eq!(fitting(&config, state, held + 700 * one - 1, 5000), 699);
            assert_eq!(fitting(&config, state, usize::MAX / 2, 5000), 5000);
            assert_eq!(fitting(&config, state, 0, 0), 1);
        }
    }
}
