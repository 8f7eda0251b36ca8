//! Queries, keys and values for estimating attention: those of a trained model, or synthetic ones.

use std::path::{Path, PathBuf};

use crate::bidirectional::{Generator, Inputs};

use candle_core::{DType, Device, Tensor};

/// The number of tokens in which the mean of correlated tokens decays to 1/e.
const TOKENS_PER_TOPIC: f64 = 32.0;
/// Standard deviations of the shared mean and of a token's own part; the total variance is 1.
const SHARED: f64 = 0.8;
const OWN: f64 = 0.6;

/// Why inputs could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// The file cannot be read, or lacks a tensor of the right shape.
    #[error("inputs: {0}")]
    File(String),
    /// A tensor operation failed.
    #[error("computing: {0}")]
    Compute(#[from] candle_core::Error),
}

/// The source of the inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file with tensors q, k and v, (cases, heads, tokens, d), of a trained model's layers.
    Model(PathBuf),
    /// Tokens whose queries, keys and values follow slowly varying means; q and k share one mean.
    Correlated,
    /// Independent normal numbers.
    Independent,
}

/// The shape of synthetic inputs: (cases, heads, tokens, d).
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of sequences.
    pub cases: usize,
    /// Number of heads.
    pub heads: usize,
    /// Tokens per sequence.
    pub tokens: usize,
    /// Size of a query, key or value.
    pub d: usize,
}

impl Source {
    /// The name in rows.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Model(_) => "model",
            Self::Correlated => "correlated",
            Self::Independent => "independent",
        }
    }

    /// Loads the inputs in f64; from a file, the first `shape.tokens` tokens of all cases and heads.
    ///
    /// # Errors
    /// If the file cannot be read, lacks a tensor, or has the wrong shapes or too few tokens.
    pub fn load(&self, shape: Shape) -> Result<Inputs, InputsError> {
        match self {
            Self::Model(path) => read(path, shape.tokens),
            Self::Correlated => synthetic(shape, 1, SHARED, OWN),
            Self::Independent => synthetic(shape, 2, 0.0, 1.0),
        }
    }
}

fn read(path: &Path, tokens: usize) -> Result<Inputs, InputsError> {
    let wrong = |problem: String| InputsError::File(format!("{}: {problem}", path.display()));
    let mut tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| wrong(error.to_string()))?;
    let mut take = |name: &str| {
        let tensor = tensors.remove(name).ok_or_else(|| wrong(format!("has no tensor {name}")))?;
        let (_, _, found, _) = tensor
            .dims4()
            .map_err(|_| wrong(format!("{name}: must be (cases, heads, tokens, d), found {:?}", tensor.dims())))?;
        if found < tokens {
            return Err(wrong(format!("{name}: must have at least {tokens} tokens, found {found}")));
        }
        Ok(tensor.narrow(2, 0, tokens)?.to_dtype(DType::F64)?.contiguous()?)
    };
    let (q, k, v) = (take("q")?, take("k")?, take("v")?);
    Inputs::new(&q, &k, &v).map_err(|error| wrong(error.to_string()))
}

fn synthetic(shape: Shape, seed: u64, shared: f64, own: f64) -> Result<Inputs, InputsError> {
    let Shape { cases, heads, tokens, d } = shape;
    let mut generator = Generator::new(seed);
    let keep = (-1.0 / TOKENS_PER_TOPIC).exp();
    // A first-order autoregression that has variance 1 from the first token on.
    let mut path = || {
        let mut numbers = vec![0.0; cases * heads * tokens * d];
        for path in numbers.chunks_exact_mut(tokens * d) {
            for at in 0..path.len() {
                let new = generator.normal();
                path[at] = if at < d { new } else { keep * path[at - d] + (1.0 - keep * keep).sqrt() * new };
            }
        }
        numbers
    };
    let (shared_mean, v_mean) = (path(), path());
    let mut around = |means: &[f64]| {
        let numbers = means.iter().map(|mean| shared * mean + own * generator.normal()).collect();
        Tensor::from_vec(numbers, (cases, heads, tokens, d), &Device::Cpu)
    };
    let (q, k, v) = (around(&shared_mean)?, around(&shared_mean)?, around(&v_mean)?);
    Ok(Inputs::new(&q, &k, &v)?)
}

/// Descriptions of the synthetic sources, for the settings of a record.
pub fn descriptions() -> [(&'static str, String); 2] {
    [
        (
            "correlated",
            format!(
                "q and k are each {SHARED} m + {OWN} N(0, 1), with independent noise. They share m, a slowly varying \
                 mean whose autocorrelation falls to 1/e over {TOKENS_PER_TOPIC} tokens. v is generated in the same \
                 way, with a mean of its own."
            ),
        ),
        (
            "independent",
            "All values are independent draws from N(0, 1). Landmarks carry no information about tokens, so LARA has \
             no advantage over FAVOR+."
                .into(),
        ),
    ]
}
