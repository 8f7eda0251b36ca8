//! One request in a slot: how much has been read, and what has been made of it so far.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use tidegate_model::sampling::Sampler;
use tracing::Span;

use super::event::{Finish, FinishReason, Interrupt, Timings};
use super::inbox::Submission;
use super::model::ModelError;
use super::outlet::Outlet;
use super::request::{Keep, Request};
use crate::session::{Answer, History, MAX_PENDING, Snapshot};
use crate::text::{Detokenizer, StopMatcher, Vocabulary};

/// Tokens of a prompt that are read between two decode steps.
const PROMPT_CHUNK: usize = 256;

/// From a piece of text to its tokens.
pub type Encode = Arc<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// What the engine knows about text.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: Arc<[u32]>,
    /// The tokens of a piece of text.
    pub encode: Encode,
}

/// How a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// By a token.
    Eos,
    /// By a stop string.
    StopString,
    /// By the number of tokens.
    Length,
    /// By the one who asked for it.
    Interrupted,
}

impl Ending {
    pub(super) fn reason(self) -> FinishReason {
        match self {
            Self::Eos | Self::StopString => FinishReason::Stop,
            Self::Length => FinishReason::Length,
            Self::Interrupted => FinishReason::Interrupted,
        }
    }
}

/// A moment to which a stop string takes the conversation back: it keeps what was shown, and nothing of the string.
pub(super) struct Mark {
    pub(super) state: Vec<f32>,
    pub(super) read: u64,
    pub(super) history: History,
    /// The tokens chosen since.
    pub(super) tokens: Vec<u32>,
    /// The text shown since.
    pub(super) shown: String,
}

impl Mark {
    /// The mark of an answer that goes on: the state that was kept, and what its pending tokens have shown. None where
    /// they alone do not explain what is held back.
    fn before(start: &Snapshot, rules: &TextRules) -> Option<Self> {
        let answer = start.answer.as_ref()?;
        let (mut detokenizer, mut shown) = (Detokenizer::new(), String::new());
        for token in &start.pending {
            detokenizer.push(rules.vocabulary.bytes(*token), &mut shown);
        }
        let length = shown.strip_suffix(&answer.held).filter(|_| detokenizer.pending() == answer.bytes)?.len();
        shown.truncate(length);
        let (state, tokens) = (start.state.clone(), start.pending.clone());
        Some(Self { state, read: start.read, history: start.history, tokens, shown })
    }
}

/// One running request.
pub(super) struct Sequence {
    pub(super) start: Option<Arc<Snapshot>>,
    /// The tokens to read before the first is chosen.
    input: Vec<u32>,
    /// How many of them are in the state; the last is read by the decode step that chooses the first.
    absorbed: usize,
    /// Tokens in the state, those before this request included.
    pub(super) read: u64,
    pub(super) history: History,
    /// The last token of the text: it is not in the state yet. `None` until the input before has been read.
    pub(super) pending_token: Option<u32>,
    generated: usize,
    prompt_tokens: usize,
    max_tokens: usize,
    ignore_eos: bool,
    /// Whether what is generated is an answer that can be gone on with.
    pub(super) is_turn: bool,
    continues: bool,
    pub(super) keep: Keep,
    pub(super) sampler: Sampler,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    carried: String,
    pub(super) mark: Option<Mark>,
    /// The text of the token before which a mark has to be made; `None` where none has to.
    mark_wanted: Option<String>,
    clock: Clock,
    pub(super) interrupt: Interrupt,
    pub(super) outlet: Outlet,
    pub(super) span: Span,
}

struct Clock {
    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
}

impl Sequence {
    pub(super) fn new(submission: Submission, rules: &TextRules) -> Self {
        let Submission { request, sender, interrupt, submitted, span } = submission;
        let prompt_tokens = request.prompt_tokens();
        let Request {
            start,
            input,
            max_tokens,
            sampler,
            detokenizer,
            stops,
            carried,
            ignore_eos,
            is_turn,
            continues,
            keep,
            ..
        } = request;
        let mut sequence = Self {
            read: start.as_ref().map_or(0, |start| start.read),
            history: start.as_ref().map_or(History::default(), |start| start.history),
            start,
            input,
            absorbed: 0,
            pending_token: None,
            generated: 0,
            prompt_tokens,
            max_tokens,
            ignore_eos,
            is_turn,
            continues,
            keep,
            sampler,
            detokenizer,
            stops,
            carried,
            mark: None,
            mark_wanted: None,
            clock: Clock { submitted, admitted: Instant::now(), first_token: None },
            interrupt,
            outlet: Outlet::new(sender),
            span,
        };
        if sequence.continues && sequence.is_unsettled() {
            sequence.mark = sequence.start.as_deref().and_then(|start| Mark::before(start, rules));
        }
        sequence.absorb(0);
        sequence
    }

    /// The next piece of the input, all of it but its last token; empty where that has been read.
    pub(super) fn next_chunk(&self) -> &[u32] {
        let end = self.input.len().saturating_sub(1);
        let Range { start, end } = self.absorbed..end.min(self.absorbed + PROMPT_CHUNK);
        &self.input[start..end]
    }

    /// Notes that the chunk of [`Self::next_chunk`] is in the state; returns its length.
    pub(super) fn chunk_was_read(&mut self) -> usize {
        let length = self.next_chunk().len();
        self.absorb(length);
        length
    }

    fn absorb(&mut self, count: usize) {
        self.history = self.history.extended(&self.input[self.absorbed..self.absorbed + count]);
        self.absorbed += count;
        self.read += count as u64;
        if self.next_chunk().is_empty() {
            self.pending_token = self.input.last().copied();
        }
    }

    /// Whether the input has been read, but for its last token.
    pub(super) fn is_read(&self) -> bool {
        self.next_chunk().is_empty()
    }

    /// Whether this request has read tokens that were not in the state it began from.
    pub(super) fn has_read_more(&self) -> bool {
        self.absorbed > 0
    }

    /// Whether more tokens are to come.
    pub(super) fn wants_tokens(&self) -> bool {
        self.generated < self.max_tokens
    }

    /// The token to decode next; `None` where the prompt is still being read or the reader is too far behind.
    pub(super) fn decodable(&self) -> Option<u32> {
        self.pending_token.filter(|_| !self.outlet.is_full())
    }

    /// Chooses a token from `logits` (vocab), the pending one having been read; adds its text, and says whether that
    /// ends the text.
    ///
    /// # Errors
    /// No logit is a number: the weights or the state are broken, and any token would be a lie.
    pub(super) fn accept(&mut self, logits: &mut [f32], rules: &TextRules) -> Result<Option<Ending>, ModelError> {
        if let Some(read) = self.pending_token.take() {
            self.read += 1;
            self.history = self.history.extended(&[read]);
        }
        let token = self.sampler.sample(logits).ok_or_else(|| ModelError::new("no logit is a number"))?;
        self.pending_token = Some(token);
        self.generated += 1;
        self.clock.first_token.get_or_insert_with(Instant::now);

        let mut text = std::mem::take(&mut self.carried);
        let carried = text.len();
        let ending = if rules.eos.contains(&token) && !self.ignore_eos {
            Some(self.close(Ending::Eos, &mut text))
        } else {
            let mut characters = String::new();
            self.detokenizer.push(rules.vocabulary.bytes(token), &mut characters);
            if self.stops.push(&characters, &mut text) {
                Some(Ending::StopString)
            } else if self.wants_tokens() {
                None
            } else if self.is_turn {
                // The next turn goes on here: what is held back stays so.
                Some(Ending::Length)
            } else {
                Some(self.close(Ending::Length, &mut text))
            }
        };
        self.note(token, &text, carried);
        self.outlet.push(token, &text);
        Ok(ending)
    }

    /// Ends a text that no stop string has ended, and lets out what was held back.
    fn close(&mut self, ending: Ending, text: &mut String) -> Ending {
        let mut rest = String::new();
        self.detokenizer.finish(&mut rest);
        if self.stops.push(&rest, text) {
            return Ending::StopString;
        }
        self.stops.finish(text);
        ending
    }

    /// Whether a stop string takes back what has been chosen, or still may.
    fn is_unsettled(&self) -> bool {
        let waits = !self.stops.held().is_empty() || !self.detokenizer.pending().is_empty();
        self.keep.end && self.stops.has_strings() && (waits || self.stops.is_stopped())
    }

    /// Keeps, or asks for, the mark to which a stop string would take the text back. The first `carried` bytes of
    /// `text` are of tokens before this one.
    fn note(&mut self, token: u32, text: &str, carried: usize) {
        let full = self.mark.as_ref().is_some_and(|mark| mark.tokens.len() >= MAX_PENDING);
        if full || !self.is_unsettled() {
            self.mark = None;
        }
        if let Some(mark) = &mut self.mark {
            mark.tokens.push(token);
            mark.shown.push_str(text);
        } else if self.is_unsettled() {
            self.mark_wanted = Some(text[carried..].to_owned());
        }
    }

    /// Whether the slot's state, which does not have the pending token, has to be kept as a mark.
    pub(super) fn wants_mark(&self) -> bool {
        self.mark_wanted.is_some()
    }

    /// Takes the state for which [`Self::wants_mark`] has asked.
    pub(super) fn set_mark(&mut self, state: Vec<f32>) {
        let tokens = self.pending_token.into_iter().collect();
        let shown = self.mark_wanted.take().unwrap_or_default();
        self.mark = Some(Mark { state, read: self.read, history: self.history, tokens, shown });
    }

    /// The answer at the end of a turn; `None` where there is none.
    pub(super) fn answer(&self, open: bool) -> Option<Answer> {
        // Also where it was interrupted before its first token: the text has its opening.
        let answers = self.is_turn && (self.max_tokens > 0 || self.continues);
        answers.then(|| {
            if !open {
                return Answer::default();
            }
            let held = self.carried.clone() + self.stops.held();
            Answer { open, held, bytes: self.detokenizer.pending().into() }
        })
    }

    /// The account of a text that has ended.
    pub(super) fn finish(&self, reason: FinishReason, snapshot: Option<Arc<Snapshot>>) -> Finish {
        let now = Instant::now();
        let first_token = self.clock.first_token.unwrap_or(now);
        Finish {
            reason,
            stop: None,
            cumulative_logprob: None,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.generated,
            timings: Timings {
                queue: self.clock.admitted - self.clock.submitted,
                prefill: first_token - self.clock.admitted,
                decode: now - first_token,
            },
            snapshot,
        }
    }
}
