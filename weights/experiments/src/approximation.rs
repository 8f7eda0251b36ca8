//! How close random estimates come to softmax attention, by number of samples: the mean squared error of RFA, FAVOR+,
//! LARA and RA, and of answering every query with the mean of V.
//!
//! [`inputs`] makes or reads queries, keys and values. The error is that of the outputs and is not divided by their
//! size, as in the figures of Zheng, Wang and Kong 2022 (arXiv 2204.04667).

pub mod inputs;

use crate::bidirectional::{Attention, Draws, Generator, Inputs, ra};
use candle_core::Tensor;
use serde::{Deserialize, Serialize};

pub use inputs::Source;

/// The error of one estimator with one number of samples on one kind of inputs.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// The source of queries, keys and values: `model`, `correlated` or `independent`.
    pub inputs: String,
    /// One of [`ESTIMATORS`], or `mean-of-v`.
    pub estimator: String,
    /// The number of random vectors, of landmarks with one sample each, or of samples per query; 0 for the mean of V.
    pub samples: usize,
    /// The mean squared error, averaged over seeds.
    pub error: f64,
    /// The lowest error of any seed.
    pub error_low: f64,
    /// The highest error of any seed.
    pub error_high: f64,
}

/// The names of estimators in rows, and their names in [`Attention::named`].
pub const ESTIMATORS: [(&str, &str); 9] = [
    ("rfa", "rfa-softmax"),
    ("favor", "favor"),
    ("lara", "lara"),
    ("lara-balance", "lara-balance"),
    ("ra", "ra"),
    ("lara-crossed", "lara-crossed"),
    ("lara-means", "lara-means"),
    ("lara-means-tokens", "lara-means-tokens"),
    ("lara-means-crossed", "lara-means-crossed"),
];

/// Number of RA's samples in memory at once.
const AT_ONCE: usize = 8;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of samples, each at least 1.
    pub samples: Vec<usize>,
    /// Number of seeds for independent draws, at least 1.
    pub seeds: u64,
}

/// Why the measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum ApproximationError {
    /// An option is out of range.
    #[error("{0}")]
    Options(String),
    /// A tensor operation failed.
    #[error("computing: {0}")]
    Compute(#[from] candle_core::Error),
}

/// Returns how often [`measure`] calls `tick`.
pub fn steps(options: &Options) -> u64 {
    ESTIMATORS.iter().map(|(_, attention)| seeds(attention, options)).sum()
}

/// Returns the number of seeds for an estimator: one is enough if nothing is drawn.
fn seeds(attention: &str, options: &Options) -> u64 {
    let random = Attention::named(attention, 1).is_none_or(|attention| attention.is_random());
    if random { options.seeds } else { 1 }
}

/// Measures all estimators on one kind of inputs: q, k and v (cases, heads, tokens, d) in f64. Calls `tick` after each
/// of [`steps`]. LARA has no rows with more landmarks than tokens.
///
/// # Errors
/// If an option is out of range or a computation fails.
pub fn measure(
    name: &str,
    inputs: &Inputs,
    options: &Options,
    tick: &mut dyn FnMut(),
) -> Result<Vec<Row>, ApproximationError> {
    if options.samples.is_empty() || options.samples.contains(&0) || options.seeds == 0 {
        return Err(ApproximationError::Options("samples and seeds must be at least 1".into()));
    }
    let exact = Attention::Softmax.forward(inputs, &Draws::None)?;
    let mean = inputs.v().mean_keepdim(2)?.broadcast_as(exact.shape())?;
    let error = mean_squared(&mean, &exact)?;
    let row = |estimator: &str, samples, errors: &[f64]| Row {
        inputs: name.into(),
        estimator: estimator.into(),
        samples,
        error: errors.iter().sum::<f64>() / errors.len() as f64,
        error_low: errors.iter().copied().fold(f64::INFINITY, f64::min),
        error_high: errors.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    };
    let mut rows = vec![row("mean-of-v", 0, &[error])];
    let tokens = inputs.q().dim(2)?.min(inputs.k().dim(2)?);
    for (number, (estimator, attention)) in ESTIMATORS.into_iter().enumerate() {
        let supported = |samples: &usize| !estimator.starts_with("lara") || *samples <= tokens;
        let counts: Vec<usize> = options.samples.iter().copied().filter(supported).collect();
        let mut errors = vec![Vec::new(); counts.len()];
        for seed in 0..seeds(attention, options) {
            // Each estimator has its own stream, so adding one does not change the results of the others.
            let mut generator = Generator::new(1000 * (number as u64 + 1) + seed);
            let found = if estimator == "ra" {
                ra_errors(inputs, &exact, &counts, &mut generator)?
            } else {
                estimator_errors(attention, inputs, &exact, &counts, &mut generator)?
            };
            errors.iter_mut().zip(found).for_each(|(errors, error)| errors.push(error));
            tick();
        }
        rows.extend(counts.iter().zip(&errors).map(|(&samples, errors)| row(estimator, samples, errors)));
    }
    Ok(rows)
}

fn mean_squared(out: &Tensor, exact: &Tensor) -> candle_core::Result<f64> {
    (out - exact)?.sqr()?.mean_all()?.to_scalar()
}

/// The errors of an estimator that makes new draws for each number of samples.
fn estimator_errors(
    name: &str,
    inputs: &Inputs,
    exact: &Tensor,
    counts: &[usize],
    generator: &mut Generator,
) -> Result<Vec<f64>, ApproximationError> {
    let error = |&samples: &usize| {
        let unknown = || ApproximationError::Options(format!("no estimator is called {name}"));
        let attention = Attention::named(name, samples).ok_or_else(unknown)?;
        let draws = attention.draw(inputs, generator)?;
        Ok(mean_squared(&attention.forward(inputs, &draws)?, exact)?)
    };
    counts.iter().map(error).collect()
}

/// RA's errors. Its estimate is a mean over samples, so the first ones of a draw also serve for smaller numbers.
fn ra_errors(
    inputs: &Inputs,
    exact: &Tensor,
    counts: &[usize],
    generator: &mut Generator,
) -> Result<Vec<f64>, ApproximationError> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|&at| counts[at]);
    let mut errors = vec![0.0; counts.len()];
    let (mut sum, mut done) = (exact.zeros_like()?, 0);
    for at in order {
        while done < counts[at] {
            let samples = AT_ONCE.min(counts[at] - done);
            let draws = Attention::Ra { samples }.draw(inputs, generator)?;
            let Draws::Queries { normals, uniforms } = &draws else {
                return Err(ApproximationError::Options("ra must draw for queries".into()));
            };
            sum = (sum + (ra(inputs, uniforms, normals)? * samples as f64)?)?;
            done += samples;
        }
        errors[at] = mean_squared(&(&sum / done as f64)?, exact)?;
    }
    Ok(errors)
}
