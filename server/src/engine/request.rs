//! A request that has been checked: what is built here needs no second look further down.

use std::sync::Arc;

use tidegate_model::sampling::{Sampler, SamplingError, SamplingParams};

use super::constraint::Grammar;
use super::ends::Ends;
use super::opening::Opening;
use super::shared::SharedPrompt;
use crate::session::Snapshot;
use crate::text::{Detokenizer, GenerationDefaults, StopError, StopMatcher, StopStrings};

/// Most alternatives of which log probabilities may be asked for.
const MAX_LOGPROBS: usize = 20;

/// Longest prompt that is scored, in tokens: each takes a step of its own.
const MAX_SCORED_PROMPT: usize = 32_768;

/// The bounds that a server sets on each request.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens in the model's vocabulary.
    pub vocab_size: usize,
    /// Longest text that is read or made into tokens, in tokens.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    /// Where a prompt is a source, which is translated. None where a prompt is the text's own beginning.
    pub sources: Option<Sources>,
}

/// What holds for sources beside the bounds on any text.
#[derive(Clone, Copy, Debug)]
pub struct Sources {
    /// Longest source that the model reads, in tokens.
    pub longest: usize,
    /// The token that every text begins with.
    pub start: u32,
}

impl Limits {
    /// Longest prompt, in tokens: a source is as long as the model reads at most.
    pub fn longest_prompt(&self) -> usize {
        self.sources.map_or(self.max_prompt_tokens, |sources| sources.longest.min(self.max_prompt_tokens))
    }

    /// Tokens that a text may be made of, as clients ask for one number: a state has no such bound, so it is the longest
    /// prompt's; where that is a source, the answer's come to it.
    pub fn context(&self) -> usize {
        let answer = if self.sources.is_some() { self.max_tokens } else { 0 };
        self.longest_prompt().saturating_add(answer)
    }
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

/// What a request goes on from.
#[derive(Clone, Debug, Default)]
pub enum Start {
    /// Nothing: the prompt is the whole text.
    #[default]
    Empty,
    /// A state that has the first tokens of the prompt in it, fewer than all: only the rest is computed.
    Prefix(Arc<Snapshot>),
    /// A conversation: the prompt is what is new, and may be empty where the conversation has a token to read. A new
    /// source takes the place of the one before and of its text.
    Session(Arc<Snapshot>),
}

/// Which snapshots a request makes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// One where the prompt has been read, but for its last token.
    pub prompt: bool,
    /// One at the end.
    pub end: bool,
}

/// What a request asks for, unchecked.
#[derive(Clone, Debug, Default)]
pub struct RequestParameters {
    /// What to go on from.
    pub start: Start,
    /// The token ids to continue, or the source to translate.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; 0 only reads the prompt, into a snapshot or for its log probabilities.
    pub max_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// How to choose tokens.
    pub sampling: SamplingParams,
    /// Whether a conversation's random numbers begin anew with `sampling.seed`, where they else would go on.
    pub reseed: bool,
    /// Whether to go on past an end-of-text token.
    pub ignore_eos: bool,
    /// Which snapshots to make.
    pub keep: Keep,
    /// Tokens before which no end-of-text token and no stop token is chosen.
    pub min_tokens: usize,
    /// Tokens that end the text as end-of-text tokens do.
    pub stop_token_ids: Vec<u32>,
    /// Log probabilities with each token: those of so many of the likeliest beside its own.
    pub logprobs: Option<usize>,
    /// The same for the prompt's tokens, which are then read from the first, whatever is known of them.
    pub prompt_logprobs: Option<usize>,
    /// What the text must follow.
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
    pub(super) start: Option<Arc<Snapshot>>,
    /// The source to read before all else; empty where none is new.
    pub(super) source: Vec<u32>,
    /// The tokens to read that are not in the state; at least one, unless nothing is to be generated.
    pub(super) input: Vec<u32>,
    /// The last tokens before the answer, which may have begun a character.
    pub(super) last: Vec<u32>,
    prompt_tokens: usize,
    pub(super) max_tokens: usize,
    pub(super) sampler: Sampler,
    pub(super) detokenizer: Detokenizer,
    pub(super) stops: StopMatcher,
    /// Text that comes out before the first token's.
    pub(super) carried: String,
    pub(super) ends: Ends,
    /// How many of the likeliest tokens are told with each, where log probabilities are asked for.
    pub(super) logprobs: Option<usize>,
    /// The same for the prompt's tokens, which are then read one by one.
    pub(super) prompt_logprobs: Option<usize>,
    pub(super) grammar: Option<Arc<dyn Grammar>>,
    /// What it has in common with other requests.
    pub(super) shared: Option<Arc<SharedPrompt>>,
    /// Whether this is a turn of a conversation, which can go on with an answer that has not ended.
    pub(super) is_turn: bool,
    /// Whether it goes on with such an answer.
    pub(super) continues: bool,
    pub(super) keep: Keep,
}

impl Request {
    /// Checks `parameters` against `limits`.
    ///
    /// # Errors
    /// The first parameter that is out of its bounds.
    pub fn new(parameters: RequestParameters, limits: &Limits) -> Result<Self, RequestError> {
        let ends = Ends::new(&parameters, limits);
        let scored = scored(&parameters, limits);
        let RequestParameters { logprobs, prompt_logprobs, .. } = parameters;
        let grammar = parameters.grammar.clone();
        let RequestParameters { start, prompt, max_tokens, stop, sampling, reseed, keep, .. } = parameters;
        let bound = |parameter, bound: String, found: String| RequestError::Bound { parameter, bound, found };
        let least = usize::from(!matches!(start, Start::Session(_)));
        if prompt.len() < least || prompt.len() > limits.longest_prompt() {
            let allowed = format!("{least} to {} tokens long", limits.longest_prompt());
            return Err(bound("prompt", allowed, format!("{} tokens", prompt.len())));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= limits.vocab_size) {
            let allowed = format!("made of token ids below {}", limits.vocab_size);
            return Err(bound("prompt", allowed, id.to_string()));
        }
        let fewest = usize::from(!keep.end && prompt_logprobs.is_none());
        if max_tokens < fewest || max_tokens > limits.max_tokens {
            let allowed = format!("from {fewest} to {}", limits.max_tokens);
            return Err(bound("max_tokens", allowed, max_tokens.to_string()));
        }
        let ends = ends?;
        scored?;
        let prompt_tokens = prompt.len();
        let stops = StopStrings::new(&stop)?;
        // What is known of a prompt has no logits: to score it, it is read from the start.
        let start = if prompt_logprobs.is_some() { Start::Empty } else { start };
        let opening = Opening::new(start, prompt, sampling, reseed, limits)?;
        if opening.continues && grammar.is_some() {
            let allowed = "absent where the answer before it goes on".into();
            return Err(bound("grammar", allowed, "one".into()));
        }
        if opening.input.is_empty() && max_tokens > 0 {
            let allowed = "at least one token long where the answer before it has ended".into();
            return Err(bound("prompt", allowed, "none".into()));
        }
        let mut carried = String::new();
        let stops = if ends.may_follow(1) {
            StopMatcher::resume(stops, &opening.answer.held, &mut carried)
        } else {
            let mut matcher = StopMatcher::new(stops);
            matcher.pass(&opening.answer.held, &mut carried);
            matcher
        };
        Ok(Self {
            start: opening.start,
            source: opening.source,
            input: opening.input,
            last: opening.last,
            prompt_tokens,
            max_tokens,
            sampler: opening.sampler,
            detokenizer: Detokenizer::resume(&opening.answer.bytes),
            stops,
            carried,
            ends,
            logprobs,
            prompt_logprobs,
            grammar,
            shared: None,
            is_turn: opening.is_turn,
            continues: opening.continues,
            keep,
        })
    }

    /// Whether it has the same prompt as `other`, to be read in the same way from the same start.
    pub(super) fn begins_as(&self, other: &Self) -> bool {
        let start = |request: &Self| request.start.as_ref().map(Arc::as_ptr);
        let texts = self.source == other.source && self.input == other.input;
        start(self) == start(other) && self.prompt_logprobs == other.prompt_logprobs && texts
    }

    /// Tokens in the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the prompt that need not be computed.
    pub fn cached_tokens(&self) -> usize {
        let read = self.start.as_ref().filter(|_| !self.is_turn).map_or(0, |snapshot| snapshot.read);
        usize::try_from(read).unwrap_or(usize::MAX)
    }
}

/// Checks what log probabilities are asked for.
fn scored(parameters: &RequestParameters, limits: &Limits) -> Result<(), RequestError> {
    let bound = |parameter, bound: String, found: String| Err(RequestError::Bound { parameter, bound, found });
    let RequestParameters { logprobs, prompt_logprobs, prompt, start, .. } = parameters;
    for (parameter, count) in [("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)] {
        if let Some(count) = count.filter(|count| *count > MAX_LOGPROBS) {
            return bound(parameter, format!("from 0 to {MAX_LOGPROBS}"), count.to_string());
        }
    }
    if prompt_logprobs.is_some() && limits.sources.is_some() {
        return bound(
            "prompt_logprobs",
            "absent where the prompt is a source, which nothing predicts".into(),
            "it".into(),
        );
    }
    if prompt_logprobs.is_some() && matches!(start, Start::Session(_)) {
        return bound("prompt_logprobs", "absent where a conversation goes on".into(), "it".into());
    }
    if prompt_logprobs.is_some() && prompt.len() > MAX_SCORED_PROMPT {
        let allowed = format!("at most {MAX_SCORED_PROMPT} tokens long where its log probabilities are asked for");
        return bound("prompt", allowed, format!("{} tokens", prompt.len()));
    }
    Ok(())
}
