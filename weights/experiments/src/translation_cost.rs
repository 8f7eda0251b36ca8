//! The cost of a translated token by source length: an encoder-decoder with random features and its softmax twin, with
//! random weights of the same shape, measured alternately in one run.
//!
//! Only decoding is compared: each measurement reads the source once, timed separately, and copies it into all rows.
//! With random features, a row reads a constant-size state; with softmax attention, it reads the key and value of every
//! source token. The twin's slots have room for the longest source of the run, and a step reads only the filled part.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tidegate_model::checkpoint::LoadError;
use tidegate_model::{Decoder, DecoderConfig, StatePool, WeightType};

/// The cost of one mixer at one source length.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// `rfa-gate` or `softmax`.
    pub mixer: String,
    /// Number of source tokens.
    pub source: usize,
    /// Rows computed at once.
    pub batch: usize,
    /// Tokens per second of all rows together: the median over all rounds.
    pub tokens_per_second: f64,
    /// The lowest of any round.
    pub low: f64,
    /// The highest of any round.
    pub high: f64,
    /// Bytes per slot, which has room for any source of the run.
    pub state_bytes: u64,
    /// Bytes in use after the last token.
    pub state_bytes_filled: u64,
    /// Milliseconds to read one source: the median over all rounds.
    pub read_ms: f64,
    /// The median over rounds of tokens per second divided by softmax's; `None` for softmax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_softmax: Option<f64>,
}

/// The model's sizes and weight type.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward part (SwiGLU).
    pub intermediate: usize,
    /// Number of blocks in the encoder, and in the decoder.
    pub layers: usize,
    /// Number of heads per attention layer.
    pub heads: usize,
    /// Size of a head's query, and its number of random vectors, which have two features each.
    pub head_dim: usize,
    /// Vocabulary size; small, so that the output head does not dominate a step.
    pub vocabulary: usize,
    /// The type of the matrices in memory.
    pub weights: WeightType,
}

impl Default for Shape {
    /// Roughly the base transformer of Vaswani et al. (2017).
    fn default() -> Self {
        let (hidden, intermediate, layers, heads, head_dim) = (512, 1376, 6, 8, 64);
        Self { hidden, intermediate, layers, heads, head_dim, vocabulary: 8192, weights: WeightType::Bf16 }
    }
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The shape of the models.
    pub shape: Shape,
    /// Source lengths in tokens, each at least 1.
    pub lengths: Vec<usize>,
    /// Rows computed at once, at least 1.
    pub batch: usize,
    /// Timed tokens per row, at least 1.
    pub tokens: usize,
    /// Repetitions, at least 1.
    pub rounds: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { shape: Shape::default(), lengths: vec![16, 64, 256, 1024, 4096], batch: 16, tokens: 32, rounds: 7 }
    }
}

/// Why the measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum CostError {
    /// An option is out of range, or needs too much memory.
    #[error("{0}")]
    Options(String),
    /// The options make an invalid config.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A step failed.
    #[error("model: {0}")]
    Model(#[from] tidegate_model::ModelError),
}

/// Untimed steps before each measurement, which warm up the processor's caches.
const WARM_UP: usize = 2;
/// Seed of the random weights.
const SEED: u64 = 0;
/// The maximum size in bytes of all states of a run.
const ROOM: usize = 3 << 30;
/// In the order of the first round; every other round reverses it.
const MIXERS: [&str; 2] = ["rfa-gate", "softmax"];

/// Returns how often [`measure`] calls `tick`.
pub fn steps(options: &Options) -> u64 {
    (options.rounds * options.lengths.len() * MIXERS.len()) as u64
}

/// Makes the config of one mixer.
///
/// # Errors
/// If the lengths or sizes are out of range.
pub fn config(mixer: &str, options: &Options) -> Result<DecoderConfig, CostError> {
    let Shape { hidden, intermediate, layers, heads, head_dim, vocabulary, .. } = options.shape;
    let longest = options.lengths.iter().max().copied().unwrap_or(0);
    let mut config = json!({
        "model_type": "rfa_seq2seq", "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "encoder_layers": layers,
        "num_attention_heads": heads, "head_dim": head_dim, "tie_word_embeddings": true,
        "max_source_positions": longest, "decoder_start_token_id": 0,
    });
    if mixer == "softmax" {
        config["attention"] = "softmax".into();
        // The window covers the whole target.
        config["sliding_window"] = (WARM_UP + options.tokens).into();
    } else {
        config["proj_dim"] = head_dim.into();
        config["position_embedding"] = "rope".into();
    }
    Ok(DecoderConfig::from_json(&config.to_string()).map_err(LoadError::from)?)
}

/// A model with one slot per row, and its measurements by length and round.
struct Subject {
    mixer: &'static str,
    decoder: Decoder,
    pool: StatePool,
    /// Tokens per second.
    rates: Vec<Vec<f64>>,
    /// Milliseconds to read a source.
    reads: Vec<Vec<f64>>,
}

/// Measures all lengths with both mixers, alternating round by round. Calls `tick` before each of [`steps`] with its
/// description.
///
/// # Errors
/// If an option is out of range or a step fails.
pub fn measure(options: &Options, tick: &mut dyn FnMut(&str)) -> Result<Vec<Row>, CostError> {
    let Options { shape, lengths, batch, tokens, rounds } = options;
    if lengths.is_empty() || lengths.contains(&0) || [batch, tokens, rounds].contains(&&0) {
        return Err(CostError::Options("lengths, batch, tokens and rounds must be at least 1".into()));
    }
    let configs = MIXERS.map(|mixer| config(mixer, options));
    let mut subjects = Vec::with_capacity(MIXERS.len());
    for (mixer, config) in MIXERS.into_iter().zip(configs) {
        let config = config?;
        // The rows' slots, and the state that is copied into them.
        let bytes = config.state_bytes().saturating_mul(batch + 1);
        if bytes > ROOM {
            return Err(CostError::Options(format!(
                "lengths and batch: the states of {mixer} must take at most {ROOM} bytes, found {bytes}"
            )));
        }
        let decoder = Decoder::random(config, shape.weights, SEED)?;
        let pool = decoder.new_pool(*batch)?;
        let none = vec![Vec::with_capacity(*rounds); lengths.len()];
        subjects.push(Subject { mixer, decoder, pool, rates: none.clone(), reads: none });
    }
    for round in 0..*rounds {
        for (at, &length) in lengths.iter().enumerate() {
            // Alternates which mixer goes first.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for subject in order {
                let subject = &mut subjects[subject];
                tick(&format!("round {} of {rounds}: {} at {length}", round + 1, subject.mixer));
                let (rate, read) = subject.measure(length, options)?;
                subject.rates[at].push(rate);
                subject.reads[at].push(read);
            }
        }
    }
    let mut rows = Vec::new();
    for (at, &length) in lengths.iter().enumerate() {
        let softmax = &subjects[1].rates[at];
        rows.extend(subjects.iter().map(|subject| subject.row(at, length, options, softmax)));
    }
    Ok(rows)
}

impl Subject {
    /// Reads a source into every row and decodes. Returns tokens per second and the milliseconds spent reading.
    fn measure(&mut self, length: usize, options: &Options) -> Result<(f64, f64), CostError> {
        let Self { decoder, pool, .. } = self;
        let (batch, vocabulary) = (options.batch, decoder.config().vocab_size);
        let clock = Instant::now();
        decoder.read_source(&ids(length, vocabulary), pool, 0)?;
        let read = clock.elapsed().as_secs_f64() * 1e3;
        if batch > 1 {
            let state = pool.export(0)?;
            for slot in 1..batch {
                pool.import(slot, &state, length as u64)?;
            }
        }
        // Rows differ from their first token on.
        let (tokens, slots) = (ids(batch, vocabulary), (0..batch).collect::<Vec<_>>());
        let mut logits = Vec::new();
        for _ in 0..WARM_UP {
            decoder.decode_into(&tokens, pool, &slots, &mut logits)?;
        }
        let clock = Instant::now();
        for _ in 0..options.tokens {
            decoder.decode_into(&tokens, pool, &slots, &mut logits)?;
        }
        Ok(((batch * options.tokens) as f64 / clock.elapsed().as_secs_f64(), read))
    }

    fn row(&self, at: usize, length: usize, options: &Options, softmax: &[f64]) -> Row {
        let config = self.decoder.config();
        let state_bytes = self.pool.state_bytes() as u64;
        let ratios = || self.rates[at].iter().zip(softmax).map(|(own, other)| own / other).collect();
        let (over_softmax, filled) = if self.mixer == "softmax" {
            // Keys and values of the source and of the target.
            let tokens = length + WARM_UP + options.tokens;
            let numbers = 2 * config.num_hidden_layers * config.inner_size() * tokens;
            (None, (numbers * size_of::<f32>()) as u64)
        } else {
            (Some(median(ratios())), state_bytes)
        };
        let rates = &self.rates[at];
        Row {
            mixer: self.mixer.into(),
            source: length,
            batch: options.batch,
            tokens_per_second: median(rates.clone()),
            low: rates.iter().copied().fold(f64::INFINITY, f64::min),
            high: rates.iter().copied().fold(0.0, f64::max),
            state_bytes,
            state_bytes_filled: filled,
            read_ms: median(self.reads[at].clone()),
            over_softmax,
        }
    }
}

/// The median of a non-empty list of numbers.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let (last, middle) = (numbers.len() - 1, numbers.len() / 2);
    f64::midpoint(numbers[last - middle], numbers[middle])
}

/// Token ids without a repeating pattern.
fn ids(count: usize, vocabulary: usize) -> Vec<u32> {
    let id = |i: usize| ((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % vocabulary as u64;
    (0..count).map(|i| id(i) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_the_midpoint() {
        assert_eq!([vec![5.0], vec![9.0, 1.0, 2.0], vec![4.0, 1.0, 2.0, 9.0]].map(median), [5.0, 2.0, 3.0]);
    }
}
