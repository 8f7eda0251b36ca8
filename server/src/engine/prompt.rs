//! The prompt of a request: what is read before the first token is generated, and the state it starts from.

use std::sync::{Arc, OnceLock};

use tidegate_model::SamplerState;
use tidegate_model::sampling::{Sampler, SamplingParams};

use super::event::TokenLogprobs;
use super::logprobs::PromptLogprobs;
use super::parameters::{Limits, RequestError, Start};
use super::row_drafts::RECENT;
use crate::session::{Answer, Snapshot};

/// Tokens at the end of a prompt in which an unfinished character may have begun: every token except a special one has
/// at least one byte.
const LAST_TOKENS: usize = 8;

/// Returns the last tokens of `pending`, the end of a conversation, followed by `prompt`: those in which an unfinished
/// character may have begun.
pub(crate) fn last_tokens(pending: &[u32], prompt: &[u32]) -> Vec<u32> {
    end_of_both(pending, prompt, LAST_TOKENS)
}

/// Returns the last `count` tokens of `a` followed by `b`, or all if there are fewer.
fn end_of_both(a: &[u32], b: &[u32], count: usize) -> Vec<u32> {
    let ends = [a, b].map(|tokens| end(tokens, count)).concat();
    end(&ends, count).to_vec()
}

/// Returns the last `count` tokens, or all if there are fewer.
fn end(tokens: &[u32], count: usize) -> &[u32] {
    &tokens[tokens.len().saturating_sub(count)..]
}

/// How a request's text relates to a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    /// A text without a conversation.
    Completion,
    /// A turn of a conversation, which begins an answer.
    Turn,
    /// A turn that continues the answer of the previous turn.
    Continuation,
}

/// What a request generated elsewhere before it was interrupted.
#[derive(Clone, Debug)]
pub struct Begun {
    /// The snapshot at the end of this text, as in [`super::Finish`].
    pub end: Arc<Snapshot>,
    /// The generated tokens.
    pub token_ids: Vec<u32>,
    /// The log probability of each of these tokens, if requested.
    pub logprobs: Vec<TokenLogprobs>,
}

/// The prompt of a request.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) start: Option<Arc<Snapshot>>,
    /// The source to encode first; empty if there is no new one.
    pub(super) source: Vec<u32>,
    /// Tokens to read that are not in the starting state. The logits after the last one choose the first generated
    /// token. Empty only if nothing is generated.
    pub(super) input: Vec<u32>,
    /// The last tokens before the answer, in which an unfinished character may have begun.
    pub(super) last_tokens: Vec<u32>,
    /// The last tokens before the answer that are known, from which draft tokens are looked up.
    pub(super) recent: Vec<u32>,
    /// How many input tokens come before the snapshot that is taken within the input.
    pub(super) mark: Option<usize>,
    /// Number of prompt tokens that the client has sent.
    pub(super) tokens: usize,
    /// How many of them need not be computed.
    pub(super) cached: usize,
    /// The log probabilities, if requested and not reported yet. While set, the prompt is read token by token.
    pub(super) logprobs: Option<PromptLogprobs>,
    /// The prompt that this request shares with others, until it has been read.
    pub(super) shared: Option<Arc<SharedPrompt>>,
    /// Whether this request has itself read any part of the prompt.
    pub(super) computed: bool,
    /// The text after the prompt, if it was begun elsewhere; until it is repeated here.
    pub(super) begun: Option<Begun>,
}

impl Prompt {
    /// Whether `other` is the same prompt, and is read in the same way from the same start.
    pub(super) fn is_read_as(&self, other: &Self) -> bool {
        let start = |prompt: &Self| prompt.start.as_ref().map(Arc::as_ptr);
        let count = |prompt: &Self| prompt.logprobs.as_ref().map(PromptLogprobs::count);
        start(self) == start(other)
            && count(self) == count(other)
            && self.source == other.source
            && self.input == other.input
    }

    /// Whether `last_tokens` are the whole text before the answer.
    pub(super) fn is_whole(&self) -> bool {
        let before = self.start.as_ref().map_or(0, |start| start.read);
        // A source is no part of the text.
        !self.source.is_empty() || before == self.cached as u64 && self.tokens == self.last_tokens.len()
    }

    /// What another request has read of the prompt on behalf of this one.
    pub(super) fn read_by_other(&self) -> Option<&ReadPrompt> {
        self.shared.as_ref()?.read()
    }
}

/// State shared by the requests with the same prompt. Each request that still needs it holds a reference.
#[derive(Debug, Default)]
pub(super) struct SharedPrompt {
    read: OnceLock<ReadPrompt>,
}

/// A prompt that has been read, without its last token.
#[derive(Debug)]
pub(super) struct ReadPrompt {
    pub(super) end: Arc<Snapshot>,
    pub(super) logprobs: Option<PromptLogprobs>,
}

impl SharedPrompt {
    /// Returns the prompt, once one of the requests has read it.
    pub(super) fn read(&self) -> Option<&ReadPrompt> {
        self.read.get()
    }

    /// Hands the prompt to the requests that have not read it. Only the first call has an effect.
    pub(super) fn hand_over(&self, read: ReadPrompt) {
        self.read.get_or_init(|| read);
    }

    /// Whether any request other than the caller's needs it.
    pub(super) fn has_others(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1
    }
}

/// How a request starts: from nothing, from a known prefix of its prompt, within a conversation, or with a source.
pub(super) struct Opening {
    pub(super) start: Option<Arc<Snapshot>>,
    /// Tokens of the prompt that the starting state has read.
    pub(super) cached: usize,
    pub(super) source: Vec<u32>,
    pub(super) input: Vec<u32>,
    pub(super) last_tokens: Vec<u32>,
    pub(super) recent: Vec<u32>,
    /// The answer to continue; empty if a new one begins.
    pub(super) answer: Answer,
    pub(super) kind: TextKind,
}

impl Opening {
    pub(super) fn new(
        start: Start,
        prompt: Vec<u32>,
        (sampling, reseed): (SamplingParams, bool),
        limits: &Limits,
    ) -> Result<(Self, Sampler), RequestError> {
        let vocab_size = limits.vocab_size;
        let Some(first) = limits.sources.map(|sources| sources.start) else {
            return match start {
                Start::Session(snapshot) => Self::turn((snapshot, None), prompt, (sampling, reseed), vocab_size),
                Start::FirstTurn { conversation, prefix } => {
                    Self::turn((conversation, Some(prefix)), prompt, (sampling, reseed), vocab_size)
                }
                Start::Empty => Self::completion(None, prompt, sampling, vocab_size),
                Start::Prefix(snapshot) => Self::completion(Some(snapshot), prompt, sampling, vocab_size),
            };
        };
        let before = match start {
            Start::Session(snapshot) if prompt.is_empty() && snapshot.read == 0 => {
                return Err(RequestError::bound(
                    "prompt",
                    "at least one token long where no source has been read",
                    "none",
                ));
            }
            Start::Session(snapshot) if prompt.is_empty() => {
                return Self::turn((snapshot, None), prompt, (sampling, reseed), vocab_size);
            }
            Start::Session(snapshot) | Start::FirstTurn { conversation: snapshot, .. } => Some(snapshot),
            // A source cannot be encoded from the state of a prefix.
            Start::Empty | Start::Prefix(_) => None,
        };
        Self::source(before.as_deref(), (prompt, first), (sampling, reseed), vocab_size)
    }

    /// Opens a completion: the prompt is the whole text, and a state for a prefix of it may be known.
    fn completion(
        start: Option<Arc<Snapshot>>,
        mut prompt: Vec<u32>,
        sampling: SamplingParams,
        vocab_size: usize,
    ) -> Result<(Self, Sampler), RequestError> {
        let mut sampler = Sampler::new(sampling, vocab_size)?;
        sampler.observe_prompt(&prompt);
        let cached = known(start.as_deref(), &prompt)?;
        let last_tokens = last_tokens(&[], &prompt);
        let recent = end(&prompt, RECENT).to_vec();
        prompt.drain(..cached);
        let (source, answer, kind) = (Vec::new(), Answer::default(), TextKind::Completion);
        Ok((Self { start, cached, source, input: prompt, last_tokens, recent, answer, kind }, sampler))
    }

    /// Opens a turn of a conversation; the prompt is the text that the turn adds. If the prompt is not empty, a new
    /// answer begins, as if the whole text had been sent as one prompt. If it is empty, the previous answer continues,
    /// as if the previous request had asked for more. If the conversation has no text yet, the state may be that of a
    /// known `prefix` of the prompt.
    fn turn(
        (snapshot, prefix): (Arc<Snapshot>, Option<Arc<Snapshot>>),
        prompt: Vec<u32>,
        (sampling, reseed): (SamplingParams, bool),
        vocab_size: usize,
    ) -> Result<(Self, Sampler), RequestError> {
        let seed = sampling.seed;
        let mut sampler = Sampler::resume(sampling, &snapshot.sampler, vocab_size)?;
        let answer = snapshot.answer.clone().filter(|answer| answer.open && prompt.is_empty());
        // If the answer continues with its own seed, its random numbers continue too.
        if reseed && (answer.is_none() || snapshot.sampler.seed != seed) {
            sampler.reseed(seed);
        }
        if !prompt.is_empty() {
            sampler.close_answer();
            sampler.observe_prompt(&prompt);
        }
        let last_tokens = last_tokens(&snapshot.pending, &prompt);
        let mut input: Vec<u32> = snapshot.pending.iter().copied().chain(prompt).collect();
        let recent = end_of_both(&snapshot.recent.0, &input, RECENT);
        let prefix = prefix.filter(|_| snapshot.tokens() == 0);
        let cached = known(prefix.as_deref(), &input)?;
        input.drain(..cached);
        let start = Some(prefix.unwrap_or(snapshot));
        let kind = if answer.is_some() { TextKind::Continuation } else { TextKind::Turn };
        let (source, answer) = (Vec::new(), answer.unwrap_or_default());
        Ok((Self { start, cached, source, input, last_tokens, recent, answer, kind }, sampler))
    }

    /// Opens a text whose prompt is a source. Encoding it replaces the whole state, including that of the conversation
    /// `before`. Of that conversation only the random numbers continue: its text is forgotten, by the penalties too, so
    /// that the answer is the same as without it. The source is not in the language of the answer, so no penalty counts
    /// it and no character of the answer begins in it.
    fn source(
        before: Option<&Snapshot>,
        (source, first): (Vec<u32>, u32),
        (sampling, reseed): (SamplingParams, bool),
        vocab_size: usize,
    ) -> Result<(Self, Sampler), RequestError> {
        let seed = sampling.seed;
        let mut sampler = match before {
            None => Sampler::new(sampling, vocab_size)?,
            Some(before) => {
                let SamplerState { seed, draws, .. } = before.sampler;
                Sampler::resume(sampling, &SamplerState { seed, draws, counts: Vec::new() }, vocab_size)?
            }
        };
        if reseed && before.is_some() {
            sampler.reseed(seed);
        }
        let kind = if before.is_some() { TextKind::Turn } else { TextKind::Completion };
        let (input, last_tokens, answer) = (vec![first], Vec::new(), Answer::default());
        let recent = Vec::new();
        Ok((Self { start: None, cached: 0, source, input, last_tokens, recent, answer, kind }, sampler))
    }
}

/// Returns how many of the first tokens of `prompt` the state of `prefix` has read.
fn known(prefix: Option<&Snapshot>, prompt: &[u32]) -> Result<usize, RequestError> {
    let read = prefix.map_or(0, |prefix| prefix.read);
    let read = usize::try_from(read).ok().filter(|read| *read == 0 || *read < prompt.len());
    let found = || format!("{} tokens", prompt.len());
    read.ok_or_else(|| RequestError::bound("prompt", "longer than its known prefix", found()))
}
