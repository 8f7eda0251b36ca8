//! The machine's roofs, measured in every round beside the cases, and the share of them that a case reaches.

use std::sync::Arc;

use tidegate_model::{DecoderConfig, Threads, roof};

use super::report::Spread;

/// What the machine gives at most, by number of threads.
pub(super) struct Roofs {
    threads: Vec<Arc<Threads>>,
    /// Bytes a second, of all rounds.
    read: Vec<Vec<f64>>,
    /// Floating-point operations a second, of all rounds.
    fma: Vec<Vec<f64>>,
}

impl Roofs {
    pub(super) fn new(threads: &[Arc<Threads>]) -> Self {
        Self { threads: threads.to_vec(), read: vec![Vec::new(); threads.len()], fma: vec![Vec::new(); threads.len()] }
    }

    /// One round.
    pub(super) fn measure(&mut self) {
        for ((threads, read), fma) in self.threads.iter().zip(&mut self.read).zip(&mut self.fma) {
            read.push(roof::read_bandwidth(threads));
            fma.push(roof::fma_peak(threads));
        }
    }

    /// Bytes a second that the threads at this place read from memory: the median, as of the cases.
    pub(super) fn read_bandwidth(&self, threads: usize) -> f64 {
        Spread::of(self.read[threads].clone()).median
    }

    /// Floating-point operations a second that they make.
    pub(super) fn fma_peak(&self, threads: usize) -> f64 {
        Spread::of(self.fma[threads].clone()).median
    }
}

/// Bytes that one step of decoding must move: the weights once, and each row's state in and out.
pub(super) fn step_bytes(weight_bytes: usize, state_bytes: usize, rows: usize) -> f64 {
    weight_bytes as f64 + (2 * rows) as f64 * state_bytes as f64
}

/// Floating-point operations of a prompt's products with weights; the head's are made for its last token alone.
pub(super) fn prompt_operations(config: &DecoderConfig, tokens: usize) -> f64 {
    let (hidden, gate) = (config.hidden_size, if config.gate { config.num_attention_heads } else { 0 });
    let block = hidden * (4 * config.inner_size() + gate + 3 * config.intermediate_size);
    2.0 * ((config.num_hidden_layers * block) as f64 * tokens as f64 + (config.vocab_size * hidden) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_moves_the_weights_once_and_every_rows_state_twice() {
        assert_eq!(step_bytes(1000, 50, 1), 1100.0);
        assert_eq!(step_bytes(1000, 50, 8), 1800.0);
    }

    #[test]
    fn a_prompts_operations_are_those_of_its_matrices() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "proj_dim": 4}"#;
        let block = 4 * 8 * 8 + 8 * 2 + 3 * 8 * 16;
        let operations = prompt_operations(&DecoderConfig::from_json(text).unwrap(), 10);
        assert_eq!(operations, 2.0 * (2.0 * f64::from(block) * 10.0 + 800.0));
    }
}
