//! The roofline: the machine's limits, measured in every round like the cases, and the minimum work of a case.

use std::sync::Arc;

use tidegate_model::{DecoderConfig, Threads, checkpoint, roofline};

/// The median and the range of a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) least: f64,
    pub(super) median: f64,
    pub(super) most: f64,
}

impl Spread {
    /// Returns the spread of a non-empty list of numbers.
    pub(super) fn of(mut numbers: Vec<f64>) -> Self {
        numbers.sort_by(f64::total_cmp);
        let (last, middle) = (numbers.len() - 1, numbers.len() / 2);
        Self { least: numbers[0], median: f64::midpoint(numbers[last - middle], numbers[middle]), most: numbers[last] }
    }
}

/// The machine's limits for each number of threads.
pub(super) struct MachineLimits {
    threads: Vec<Arc<Threads>>,
    /// Bytes per second, as (lanes, rounds).
    read: Vec<Vec<f64>>,
    /// Floating-point operations per second, as (lanes, rounds).
    fma: Vec<Vec<f64>>,
}

impl MachineLimits {
    pub(super) fn new(threads: &[Arc<Threads>]) -> Self {
        Self { threads: threads.to_vec(), read: vec![Vec::new(); threads.len()], fma: vec![Vec::new(); threads.len()] }
    }

    /// Measures one round.
    pub(super) fn measure(&mut self) {
        for ((threads, read), fma) in self.threads.iter().zip(&mut self.read).zip(&mut self.fma) {
            read.push(roofline::read_bandwidth(threads));
            fma.push(roofline::fma_peak(threads));
        }
    }

    /// Returns the median read bandwidth of the lane's threads, in bytes per second; `None` on a GPU, whose limits are
    /// not measured.
    pub(super) fn read_bandwidth(&self, lane: usize) -> Option<f64> {
        self.read.get(lane).map(|read| Spread::of(read.clone()).median)
    }

    /// Returns the median number of floating-point operations per second.
    pub(super) fn fma_peak(&self, lane: usize) -> Option<f64> {
        self.fma.get(lane).map(|fma| Spread::of(fma.clone()).median)
    }
}

/// Returns the bytes of a row's state that one step must move when its text has `tokens` tokens. The whole state is
/// read and written, except a key-value cache: of that, only the entries of those tokens are read.
pub(super) fn row_bytes(config: &DecoderConfig, state_bytes: usize, tokens: usize) -> f64 {
    let Some(window) = config.sliding_window else { return 2.0 * state_bytes as f64 };
    let share = (window * config.cached_numbers()) as f64 / config.state_layout().numbers() as f64;
    let (ring, reached) = (share * state_bytes as f64, tokens.min(window) as f64 / window as f64);
    2.0 * (state_bytes as f64 - ring) + ring * reached
}

/// Returns the bytes that one decode step must move: the weights once, and each row's state.
pub(super) fn step_bytes(weight_bytes: usize, row_bytes: f64, rows: usize) -> f64 {
    weight_bytes as f64 + rows as f64 * row_bytes
}

/// Returns the floating-point operations for the products of a prompt with the weights (with the output head for the
/// last token only), and with the keys and values of a cache of `depth` tokens before it.
pub(super) fn prompt_operations(config: &DecoderConfig, tokens: usize, depth: usize) -> f64 {
    // Convolutions have three dimensions and are not matrix products.
    let is_matrix =
        |name: &str, shape: &[usize]| name.contains(".layers.") && name.ends_with(".weight") && shape.len() == 2;
    let tensors = checkpoint::tensors(config).into_iter().filter(|(name, shape)| is_matrix(name, shape));
    let matrices: usize = tensors.map(|(_, shape)| shape.iter().product::<usize>()).sum();
    let seen = |window: usize| (depth + 1..=depth + tokens).map(|seen| seen.min(window) as f64).sum::<f64>();
    let cached = 2.0 * config.inner_size() as f64 * config.sliding_window.map_or(0.0, seen);
    let layers = config.num_hidden_layers as f64;
    let head = (config.vocab_size * config.hidden_size) as f64;
    2.0 * (matrices as f64 * tokens as f64 + layers * cached + head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(Spread::of(vec![5.0]), Spread { least: 5.0, median: 5.0, most: 5.0 });
        assert_eq!(Spread::of(vec![9.0, 1.0, 2.0]), Spread { least: 1.0, median: 2.0, most: 9.0 });
        assert_eq!(Spread::of(vec![4.0, 1.0, 2.0, 9.0]).median, 3.0);
    }

    #[test]
    fn a_step_moves_the_weights_once_and_every_rows_state_twice() {
        let moved = |rows| step_bytes(1000, row_bytes(&config(r#""proj_dim": 4"#), 50, 7), rows);
        assert_eq!([1, 8].map(moved), [1100.0, 1800.0]);
    }

    #[test]
    fn a_step_of_softmax_reads_only_the_cached_tokens() {
        let config = config(SOFTMAX);
        assert_eq!([0, 8, 16, 20].map(|tokens| row_bytes(&config, 3200, tokens)), [0.0, 1600.0, 3200.0, 3200.0]);
    }

    #[test]
    fn a_step_of_the_hybrid_moves_its_sums_twice_and_reads_its_window() {
        for (gate, ring) in [(true, 2 * 4 + 1), (false, 2 * 4)] {
            let keys = format!(r#""attention": "hybrid", "sliding_window": 16, "proj_dim": 4, "gate": {gate}"#);
            let config = config(&keys);
            // S (8, 4), z (8) and c of two heads in two layers, each number of four bytes.
            let sums = 2.0 * 16.0 * (8.0 * 5.0 + 1.0);
            for tokens in [0, 8, 16, 20] {
                let want = sums + 16.0 * f64::from(ring * tokens.min(16));
                let bytes = row_bytes(&config, config.state_bytes(), tokens as usize);
                assert!((bytes - want).abs() < 1e-6, "{tokens} tokens: {bytes}, not {want}");
            }
        }
    }

    const SOFTMAX: &str = r#""attention": "softmax", "sliding_window": 16"#;

    fn config(more: &str) -> DecoderConfig {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "#;
        DecoderConfig::from_json(&format!("{text}{more}}}")).unwrap()
    }

    #[test]
    fn a_prompts_operations_are_those_of_the_matrices_and_of_the_cache() {
        let block = 4 * 8 * 8 + 8 * 2 + 3 * 8 * 16;
        let operations = prompt_operations(&config(r#""proj_dim": 4"#), 10, 100);
        assert_eq!(operations, 2.0 * (2.0 * f64::from(block) * 10.0 + 800.0));
        // Three tokens see 15, 16 and 16 keys, and as many values.
        let block = block - 8 * 2;
        let operations = prompt_operations(&config(SOFTMAX), 3, 14);
        assert_eq!(operations, 2.0 * (2.0 * (f64::from(block) * 3.0 + 2.0 * 8.0 * 47.0) + 800.0));
    }

    #[test]
    fn families_with_other_blocks_have_the_operations_of_their_matrices() {
        let text = r#"{"model_type": "mamba2", "vocab_size": 100, "hidden_size": 8, "num_heads": 2, "head_dim": 8,
            "state_size": 5, "n_groups": 1, "num_hidden_layers": 3}"#;
        let block = 8 * (16 + (16 + 2 * 5) + 2) + 16 * 8;
        let operations = prompt_operations(&DecoderConfig::from_json(text).unwrap(), 10, 100);
        assert_eq!(operations, 2.0 * (3.0 * f64::from(block) * 10.0 + 800.0));
    }
}
