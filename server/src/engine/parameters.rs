//! The parameters of a request, and the limits that a server sets.

use std::fmt;
use std::sync::Arc;

use tidegate_model::sampling::{SamplingError, SamplingParams};

use super::constraint::Grammar;
use crate::session::Snapshot;
use crate::text::{GenerationDefaults, StopError};

/// The limits that a server sets on each request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens in the model's vocabulary.
    pub vocab_size: usize,
    /// Longest prompt, and longest text to tokenize, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    /// Set for an encoder-decoder, where a prompt is a source to translate; `None` where the text continues the prompt.
    pub sources: Option<Sources>,
}

/// What an encoder-decoder adds to [`Limits`].
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Longest source that the model reads, in tokens.
    pub longest: usize,
    /// The token that every text begins with.
    pub start: u32,
}

impl Limits {
    /// Longest prompt, in tokens. A source is limited by the model too.
    pub fn longest_prompt(&self) -> usize {
        self.sources.map_or(self.max_prompt_tokens, |sources| sources.longest.min(self.max_prompt_tokens))
    }

    /// Returns the context length that clients ask for. The state sets no limit, so this is the longest prompt; for an
    /// encoder-decoder it is the longest prompt plus the longest answer.
    pub fn context(&self) -> usize {
        let answer = if self.sources.is_some() { self.max_tokens } else { 0 };
        self.longest_prompt().saturating_add(answer)
    }
}

/// Returns the default sampling parameters: the model's recommendations, or else plain sampling from its distribution.
///
/// # Errors
/// A recommendation is out of bounds.
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

/// The state that a request starts from.
#[derive(Clone, Debug, Default)]
pub enum Start {
    /// The empty state: the prompt is the whole text.
    #[default]
    Empty,
    /// A state that has read the first tokens of the prompt, but not all: only the rest is computed.
    Prefix(Arc<Snapshot>),
    /// A conversation. The prompt is the new text, and may be empty if the conversation has a token left to read. A new
    /// source replaces the previous source and its text.
    Session(Arc<Snapshot>),
    /// A conversation that has no token yet, with a state that has read the first tokens of its first text, but not
    /// all.
    FirstTurn {
        /// The conversation whose random numbers continue.
        conversation: Arc<Snapshot>,
        /// The state that has read the first tokens of the prompt.
        prefix: Arc<Snapshot>,
    },
}

impl Start {
    /// Whether the request continues or begins a conversation.
    pub(super) fn is_conversation(&self) -> bool {
        matches!(self, Self::Session(_) | Self::FirstTurn { .. })
    }
}

/// Receives snapshots of a text on the engine's thread, as soon as they exist. If they were sent as events instead,
/// texts that nobody reads could hold more states than there are slots, without any bound.
pub trait TakeSnapshots: fmt::Debug + Send + Sync {
    /// Receives a snapshot of a part of the prompt, of the prompt without its last token, or of the whole text.
    fn take(&self, snapshot: &Arc<Snapshot>);
}

/// Which snapshots are taken for other requests, whose texts may begin in the same way.
#[derive(Clone, Debug)]
pub struct Keeper {
    /// The receiver of the snapshots.
    pub taker: Arc<dyn TakeSnapshots>,
    /// The number of prompt tokens after which a snapshot is taken, besides the one after the whole prompt. Has no
    /// effect if the request starts there or later, or does not read the prompt in chunks.
    pub mark: Option<usize>,
    /// Whether a snapshot is also taken at the end of the text.
    pub end: bool,
}

/// The parameters of a request. [`super::Request::new`] validates them.
#[derive(Clone, Debug, Default)]
pub struct RequestParameters {
    /// The state to start from.
    pub start: Start,
    /// The token ids to continue, or the source to translate.
    pub prompt: Vec<u32>,
    /// Most tokens to generate. With 0 the request only reads the prompt, for snapshots or log probabilities.
    pub max_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Strings that begin the next turn of the conversation, and end the text as well.
    pub turns: &'static [&'static str],
    /// How tokens are sampled.
    pub sampling: SamplingParams,
    /// Whether a conversation's random numbers restart from `sampling.seed` instead of continuing.
    pub reseed: bool,
    /// Whether to continue after an end-of-text token.
    pub ignore_eos: bool,
    /// Whether [`Finish`](super::Finish) includes the snapshot at the end of the text.
    pub snapshot: bool,
    /// The snapshots to take for other requests.
    pub keeper: Option<Keeper>,
    /// Fewest tokens to generate before an end-of-text token or a stop token may be sampled.
    pub min_tokens: usize,
    /// Tokens that end the text like end-of-text tokens.
    pub stop_token_ids: Vec<u32>,
    /// Number of most likely tokens whose log probabilities are reported with each generated token's own; `None` for no
    /// log probabilities.
    pub logprobs: Option<usize>,
    /// Like [`Self::logprobs`], for the prompt's tokens. The whole prompt is then computed, even if a state for a
    /// prefix is known.
    pub prompt_logprobs: Option<usize>,
    /// The grammar that the text must follow.
    pub grammar: Option<Arc<dyn Grammar>>,
}

/// Why a request was refused; the message names the parameter and its bound.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// A value out of its bounds.
    #[error("{parameter} must be {bound}, found {found}")]
    Bound {
        /// The parameter.
        parameter: &'static str,
        /// The values that are accepted.
        bound: String,
        /// The value that was given.
        found: String,
    },
    /// A prompt with more tokens than the model reads at once.
    #[error("prompt must be {least} to {most} tokens long, found {found} tokens")]
    TooLong {
        /// Fewest tokens that are accepted.
        least: usize,
        /// Most tokens that are accepted.
        most: usize,
        /// Number of tokens in the prompt.
        found: usize,
    },
    /// A sampling parameter out of its bounds.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// Invalid stop strings.
    #[error(transparent)]
    Stop(#[from] StopError),
}

impl RequestError {
    /// A value out of its bounds.
    pub(super) fn bound(parameter: &'static str, bound: impl Into<String>, found: impl fmt::Display) -> Self {
        Self::Bound { parameter, bound: bound.into(), found: format!("{found}") }
    }

    /// The name of the parameter at fault.
    pub fn parameter(&self) -> &'static str {
        match self {
            Self::Bound { parameter, .. } => parameter,
            Self::TooLong { .. } => "prompt",
            Self::Sampling(error) => error.parameter(),
            Self::Stop(_) => "stop",
        }
    }
}
