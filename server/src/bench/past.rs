//! The states of rows at a depth. They are computed by the model, or random if the state is a key-value cache:
//! prefilling a long cache would take minutes, and the time of a step does not depend on the numbers.

use anyhow::{Result, bail};
use tidegate_model::{DecoderConfig, StateType};

/// States by depth.
pub(super) enum Past {
    /// States computed by the model, one per depth.
    Read(Vec<Vec<f32>>),
    /// Random keys and values for the greatest depth; smaller depths use the first of them.
    Random(Vec<f32>),
}

impl Past {
    /// Creates a random state of `depth` tokens.
    pub(super) fn random(config: &DecoderConfig, depth: usize) -> Self {
        let layout = config.state_layout();
        let (window, d) = (config.sliding_window.unwrap_or(1), config.head_dim);
        let mut numbers = vec![0.0; layout.numbers()];
        let (memories, tails) = numbers.split_at_mut(layout.memory());
        // Entries that no token has reached stay untouched, so they use no memory.
        let reached = memories.chunks_exact_mut(window * d).flat_map(|rows| &mut rows[..depth.min(window) * d]);
        let mut state = 1u64;
        for number in reached.chain(tails) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *number = (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        }
        Self::Random(numbers)
    }

    /// Returns the state at this index of the plan's depths.
    pub(super) fn at(&self, depth: usize) -> &[f32] {
        match self {
            Self::Read(states) => &states[depth],
            Self::Random(numbers) => numbers,
        }
    }

    /// Returns the name of the variant in a report.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Read(_) => "read",
            Self::Random(_) => "drawn",
        }
    }
}

/// Counts the memory that key-value caches will fill. The system provides it only as they fill, so without this count a
/// measurement could run out of memory.
#[derive(Default)]
pub(super) struct MemoryBudget {
    reserved: u64,
}

impl MemoryBudget {
    /// Reserves the memory that `rows` rows and one [`Past`] will fill.
    pub(super) fn reserve(&mut self, config: &DecoderConfig, state: StateType, rows: u64) -> Result<()> {
        let row = match state {
            StateType::F32 => config.state_bytes() as u64,
            StateType::Bf16 => config.state_bytes() as u64 / 2,
        };
        let bytes = rows.saturating_mul(row).saturating_add(config.state_bytes() as u64);
        if let Some(free) = free().map(|free| free.saturating_sub(self.reserved)).filter(|&free| free < bytes) {
            let [bytes, rows, row, free] = [bytes, rows, row, free].map(grouped);
            bail!(
                "{rows} rows of {row} bytes, and one in f32 to copy from, need {bytes} bytes, but {free} are free; \
                 reduce --depths, --batch or --threads, or use --state bf16"
            );
        }
        self.reserved += rows.saturating_mul(row);
        Ok(())
    }
}

/// Returns the free memory in bytes; `None` if the system does not report it.
fn free() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}

/// Formats `1234567` as `1,234,567`.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use tidegate_model::{Decoder, WeightType};

    use super::*;

    #[test]
    fn a_random_past_fills_the_entries_that_its_tokens_have_reached() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 2, "num_attention_heads": 2, "attention": "softmax", "sliding_window": 100}"#;
        let config = DecoderConfig::from_json(text).unwrap();
        let decoder = Decoder::random(config.clone(), WeightType::F32, 0).unwrap();
        let mut pool = decoder.new_pool(1).unwrap();
        let past = Past::random(&config, 70);
        for depth in [0, 30, 70] {
            pool.import(0, past.at(0), depth as u64).unwrap();
            let state = pool.export(0).unwrap();
            assert_eq!(state.iter().filter(|&&v| v != 0.0).count(), 2 * 2 * 2 * depth * 4, "{depth}");
            assert!(decoder.decode(&[1], &mut pool, &[0]).unwrap().iter().all(|v| v.is_finite()));
        }
    }
}
