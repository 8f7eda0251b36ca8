//! Queries, keys and values to estimate attention on: of a trained model, or made up.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use crate::bidirectional::{Generator, Inputs};

use super::ApproximationError;

/// How far the mean of correlated tokens moves on from one to the next: it forgets 1/e in so many tokens.
const TOKENS_PER_TOPIC: f64 = 32.0;
/// Standard deviations of the shared mean and of a token's own part: together the variance is 1.
const SHARED: f64 = 0.8;
const OWN: f64 = 0.6;

/// Where inputs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file of tensors q, k and v, (cases, heads, tokens, d), of a trained model's layers.
    Model(PathBuf),
    /// Tokens whose queries, keys and values follow slowly varying means; q and k share theirs.
    Correlated,
    /// Every number normal and independent.
    Independent,
}

/// (cases, heads, tokens, d) of made-up inputs.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Sequences.
    pub cases: usize,
    /// Heads.
    pub heads: usize,
    /// Tokens of a sequence.
    pub tokens: usize,
    /// Numbers of a query, a key or a value.
    pub d: usize,
}

impl Source {
    /// What rows call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Model(_) => "model",
            Self::Correlated => "correlated",
            Self::Independent => "independent",
        }
    }

    /// The inputs in f64. Of a file, the first `shape.tokens` tokens of all its cases and heads.
    ///
    /// # Errors
    /// When the file cannot be read, lacks a tensor or has other shapes, or holds fewer tokens.
    pub fn load(&self, shape: Shape) -> Result<Inputs, ApproximationError> {
        match self {
            Self::Model(path) => read(path, shape.tokens),
            Self::Correlated => made(shape, 1, SHARED, OWN),
            Self::Independent => made(shape, 2, 0.0, 1.0),
        }
    }
}

fn read(path: &Path, tokens: usize) -> Result<Inputs, ApproximationError> {
    let wrong = |problem: String| ApproximationError::Inputs(format!("{}: {problem}", path.display()));
    let mut tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| wrong(error.to_string()))?;
    let mut take = |name: &str| {
        let tensor = tensors.remove(name).ok_or_else(|| wrong(format!("has no tensor {name}")))?;
        let (_, _, found, _) = tensor
            .dims4()
            .map_err(|_| wrong(format!("{name}: must be (cases, heads, tokens, d), found {:?}", tensor.dims())))?;
        if found < tokens {
            return Err(wrong(format!("{name}: {tokens} tokens are asked for, {found} are there")));
        }
        Ok(tensor.narrow(2, 0, tokens)?.to_dtype(DType::F64)?.contiguous()?)
    };
    let (q, k, v) = (take("q")?, take("k")?, take("v")?);
    Inputs::new(&q, &k, &v).map_err(|error| wrong(error.to_string()))
}

fn made(shape: Shape, seed: u64, shared: f64, own: f64) -> Result<Inputs, ApproximationError> {
    let Shape { cases, heads, tokens, d } = shape;
    let mut generator = Generator::new(seed);
    let keep = (-1.0 / TOKENS_PER_TOPIC).exp();
    // A first-order autoregression whose variance is 1 from the first token on.
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
    let (of_q_and_k, of_v) = (path(), path());
    let mut around = |means: &[f64]| {
        let numbers = means.iter().map(|mean| shared * mean + own * generator.normal()).collect();
        Tensor::from_vec(numbers, (cases, heads, tokens, d), &Device::Cpu)
    };
    let (q, k, v) = (around(&of_q_and_k)?, around(&of_q_and_k)?, around(&of_v)?);
    Ok(Inputs::new(&q, &k, &v)?)
}

/// What `settings` say of the sources.
pub fn described() -> [(&'static str, String); 2] {
    [
        (
            "correlated",
            format!(
                "q and k {OWN} x N(0, 1) about {SHARED} x a mean that both share and that forgets 1/e in {TOKENS_PER_TOPIC} tokens; v likewise about its own"
            ),
        ),
        (
            "independent",
            "every number N(0, 1) and independent: landmarks know nothing of tokens, so LARA has no advantage over FAVOR+".into(),
        ),
    ]
}
