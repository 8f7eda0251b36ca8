//! How a request begins: from nothing, from what is known of its prompt, in the middle of a conversation, or with a
//! source.

use std::sync::Arc;

use tidegate_model::SamplerState;
use tidegate_model::sampling::{Sampler, SamplingParams};

use super::request::{Limits, RequestError, Start};
use crate::session::{Answer, Snapshot};

/// Tokens of a prompt's end in which a character may have begun: each has a byte, but for special ones.
const LAST_TOKENS: usize = 8;

/// The last tokens of a text that ends with `pending`, the end of a conversation, and then `prompt`: those in which a
/// character may have begun.
pub(crate) fn last_tokens(pending: &[u32], prompt: &[u32]) -> Vec<u32> {
    let ends = [pending, prompt].map(|tokens| &tokens[tokens.len().saturating_sub(LAST_TOKENS)..]).concat();
    ends[ends.len().saturating_sub(LAST_TOKENS)..].to_vec()
}

/// How a request begins.
pub(super) struct Opening {
    pub(super) start: Option<Arc<Snapshot>>,
    pub(super) source: Vec<u32>,
    pub(super) input: Vec<u32>,
    pub(super) last: Vec<u32>,
    pub(super) sampler: Sampler,
    pub(super) answer: Answer,
    pub(super) is_turn: bool,
    pub(super) continues: bool,
}

impl Opening {
    pub(super) fn new(
        start: Start,
        prompt: Vec<u32>,
        sampling: SamplingParams,
        reseed: bool,
        limits: &Limits,
    ) -> Result<Self, RequestError> {
        let vocab_size = limits.vocab_size;
        let Some(first) = limits.sources.map(|sources| sources.start) else {
            return match start {
                Start::Session(snapshot) => Self::turn(snapshot, prompt, sampling, reseed, vocab_size),
                Start::Empty => Self::whole(None, prompt, sampling, vocab_size),
                Start::Prefix(snapshot) => Self::whole(Some(snapshot), prompt, sampling, vocab_size),
            };
        };
        let before = match start {
            Start::Session(snapshot) if prompt.is_empty() && snapshot.read == 0 => {
                return Err(refused("at least one token long where no source has been read", "none".into()));
            }
            Start::Session(snapshot) if prompt.is_empty() => {
                return Self::turn(snapshot, prompt, sampling, reseed, vocab_size);
            }
            Start::Session(snapshot) => Some(snapshot),
            // A beginning of a source says nothing of its encoding.
            Start::Empty | Start::Prefix(_) => None,
        };
        let opening = Self::source(before.as_deref(), prompt, sampling, reseed, vocab_size)?;
        Ok(Self { input: vec![first], ..opening })
    }

    /// The prompt is the whole text, and may have a beginning that is known.
    fn whole(
        start: Option<Arc<Snapshot>>,
        mut prompt: Vec<u32>,
        sampling: SamplingParams,
        vocab_size: usize,
    ) -> Result<Self, RequestError> {
        let mut sampler = Sampler::new(sampling, vocab_size)?;
        sampler.observe_prompt(&prompt);
        let read = start.as_ref().map_or(0, |snapshot| snapshot.read);
        let read = usize::try_from(read).ok().filter(|read| *read == 0 || *read < prompt.len());
        let Some(read) = read else {
            return Err(refused("longer than what is known of it", format!("{} tokens", prompt.len())));
        };
        let last = last_tokens(&[], &prompt);
        prompt.drain(..read);
        let (source, answer) = (Vec::new(), Answer::default());
        Ok(Self { start, source, input: prompt, last, sampler, answer, is_turn: false, continues: false })
    }

    /// The prompt is what is new. Where there is something, a new answer begins, as if the whole text had been sent
    /// as one prompt; where there is nothing, the answer goes on, as if more of it had been asked for at once.
    fn turn(
        snapshot: Arc<Snapshot>,
        prompt: Vec<u32>,
        sampling: SamplingParams,
        reseed: bool,
        vocab_size: usize,
    ) -> Result<Self, RequestError> {
        let seed = sampling.seed;
        let mut sampler = Sampler::resume(sampling, &snapshot.sampler, vocab_size)?;
        let answer = snapshot.answer.clone().filter(|answer| answer.open && prompt.is_empty());
        // An answer that goes on with the seed that it began with goes on in its random numbers too.
        if reseed && (answer.is_none() || snapshot.sampler.seed != seed) {
            sampler.reseed(seed);
        }
        if !prompt.is_empty() {
            sampler.close_answer();
            sampler.observe_prompt(&prompt);
        }
        let last = last_tokens(&snapshot.pending, &prompt);
        let input = snapshot.pending.iter().copied().chain(prompt).collect();
        let (continues, answer) = (answer.is_some(), answer.unwrap_or_default());
        let source = Vec::new();
        Ok(Self { start: Some(snapshot), source, input, last, sampler, answer, is_turn: true, continues })
    }

    /// The prompt is a source, whose encoding takes the place of the whole state: also where the conversation `before`
    /// has had another. Of that the random numbers go on; its text is forgotten, by the penalties too, so that the
    /// answer is the one that the source has without it. A source is no text of the answer's language: it counts for
    /// no penalty, and no character begins in it.
    fn source(
        before: Option<&Snapshot>,
        source: Vec<u32>,
        sampling: SamplingParams,
        reseed: bool,
        vocab_size: usize,
    ) -> Result<Self, RequestError> {
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
        let (input, last, answer, is_turn) = (Vec::new(), Vec::new(), Answer::default(), before.is_some());
        Ok(Self { start: None, source, input, last, sampler, answer, is_turn, continues: false })
    }
}

fn refused(bound: &str, found: String) -> RequestError {
    RequestError::Bound { parameter: "prompt", bound: bound.into(), found }
}
