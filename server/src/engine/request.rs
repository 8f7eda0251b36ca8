//! A request that has been checked: what is built here needs no second look further down.

use tidegate_model::sampling::{Sampler, SamplingError, SamplingParams};

use crate::text::{GenerationDefaults, StopError, StopStrings};

/// The bounds that a server sets on each request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens in the model's vocabulary.
    pub vocab_size: usize,
    /// Longest prompt, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
}

/// How tokens are chosen where a request says nothing: as the model's makers recommend, else as drawn from the
/// model's own distribution.
///
/// # Errors
/// A recommendation out of its bounds.
pub fn recommended_sampling(defaults: &GenerationDefaults, vocab_size: usize) -> Result<SamplingParams, SamplingError> {
    let mut sampling = SamplingParams::default();
    let set = |target: &mut f32, value: Option<f64>| {
        if let Some(value) = value {
            *target = value as f32;
        }
    };
    set(&mut sampling.temperature, defaults.temperature);
    set(&mut sampling.top_p, defaults.top_p);
    set(&mut sampling.min_p, defaults.min_p);
    set(&mut sampling.repetition_penalty, defaults.repetition_penalty);
    if let Some(top_k) = defaults.top_k {
        sampling.top_k = top_k;
    }
    sampling.validate(vocab_size)?;
    Ok(sampling)
}

/// What a request asks for, unchecked.
#[derive(Clone, Debug)]
pub struct RequestParameters {
    /// The token ids to continue.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Whether to go on past an end-of-text token.
    pub ignore_eos: bool,
}

/// Why a request was refused; the message names the parameter and its bound.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A value out of its bounds.
    #[error("{parameter} must be {bound}, found {found}")]
    Bound {
        /// The parameter.
        parameter: &'static str,
        /// What is allowed.
        bound: String,
        /// What was there.
        found: String,
    },
    /// A sampling parameter out of its bounds.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Bad stop strings.
    #[error(transparent)]
    Stop(#[from] StopError),
}

impl RequestError {
    /// The parameter at fault.
    pub fn parameter(&self) -> &'static str {
        match self {
            Self::Bound { parameter, .. } => parameter,
            Self::Sampling(error) => error.parameter(),
            Self::Stop(_) => "stop",
        }
    }
}

/// A request that the engine can run.
#[derive(Debug)]
pub struct Request {
    pub(super) prompt: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) stops: StopStrings,
    pub(super) sampler: Sampler,
    pub(super) ignore_eos: bool,
}

impl Request {
    /// Checks `parameters` against `limits`.
    ///
    /// # Errors
    /// The first parameter that is out of its bounds.
    pub fn new(parameters: RequestParameters, limits: &Limits) -> Result<Self, RequestError> {
        let RequestParameters { prompt, max_tokens, stop, sampling, ignore_eos } = parameters;
        let bound = |parameter, bound: String, found: String| RequestError::Bound { parameter, bound, found };
        if prompt.is_empty() || prompt.len() > limits.max_prompt_tokens {
            let allowed = format!("1 to {} tokens long", limits.max_prompt_tokens);
            return Err(bound("prompt", allowed, format!("{} tokens", prompt.len())));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= limits.vocab_size) {
            let allowed = format!("made of token ids below {}", limits.vocab_size);
            return Err(bound("prompt", allowed, id.to_string()));
        }
        if max_tokens == 0 || max_tokens > limits.max_tokens {
            return Err(bound("max_tokens", format!("from 1 to {}", limits.max_tokens), max_tokens.to_string()));
        }
        let stops = StopStrings::new(&stop)?;
        let mut sampler = Sampler::new(sampling, limits.vocab_size)?;
        sampler.observe_prompt(&prompt);
        Ok(Self { prompt, max_tokens, stops, sampler, ignore_eos })
    }

    /// Tokens in the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt.len()
    }
}
