//! One request in a slot: what it does next, how much has been read, and what has been generated.

use std::time::Instant;

use tracing::Span;

use super::error::SequenceError;
use super::event::{Finish, Interrupt, Timings};
use super::event_sender::EventSender;
use super::generation::{Choice, Ending, Generation};
use super::logprobs::Logprobs;
use super::output::{TextBuffers, TextOutput};
use super::parameters::Keeper;
use super::prompt::{Prompt, TextKind};
use super::request::Request;
use super::rollback::{Position, Rollback};
use super::row_drafts::RowDrafts;
use super::submission::Submission;
use super::text_rules::TextRules;
use crate::session::Answer;

/// What a sequence does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for another request to read the prompt that they share.
    AwaitPrompt,
    /// Reads the whole source at once.
    ReadSource,
    /// Reads the input in chunks, starting at token `next`.
    Prefill { next: usize },
    /// Reads the input one decode step per token, starting at token `next`; the logits score the tokens that follow.
    ScorePrompt { next: usize },
    /// Reads the unread tokens in a chunk. Afterwards, `pending` is as in [`Self::Decode`].
    ReadForced { pending: u32 },
    /// Reads the unread tokens in chunks, after which the text ends: they are the end of a text that a stop string has
    /// rolled back.
    ReadBack,
    /// Generates. The pending token is the last token of the text and not in the state yet. There is none if the input
    /// is empty, or if the token has ended the text.
    Decode { pending: Option<u32> },
}

/// The client of a request.
pub(super) struct Client {
    pub(super) events: EventSender,
    pub(super) interrupt: Interrupt,
    /// The span of the engine's log lines about the request.
    pub(super) span: Span,
    /// The index of its tenant.
    pub(super) tenant: usize,
    /// Tokens that the tenant's virtual time has counted in advance, and that have not been read or generated yet.
    pub(super) advance: usize,
    /// When the request last took part in a decode step or got its slot, counted in the engine's passes.
    pub(super) since: u64,
    /// Passes of the engine between submission and slot.
    waited: u64,
    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
}

/// A running request.
pub(super) struct Sequence {
    pub(super) phase: Phase,
    pub(super) prompt: Prompt,
    pub(super) position: Position,
    /// Tokens of the answer before the pending one that the state has not read yet, because a grammar forced their
    /// successors or a stop string has rolled the text back.
    pub(super) unread: Vec<u32>,
    /// The last tokens of the text, if they were not generated, because a stop string began within a token.
    pub(super) retokenized: Vec<u32>,
    pub(super) generation: Generation,
    pub(super) output: TextOutput,
    pub(super) kind: TextKind,
    pub(super) snapshot: bool,
    pub(super) keeper: Option<Keeper>,
    pub(super) rollback: Option<Rollback>,
    /// `None` without speculation.
    pub(super) drafts: Option<RowDrafts>,
    pub(super) client: Client,
}

/// The outcome of [`Sequence::accept`].
pub(super) struct Accepted {
    pub(super) ending: Option<Ending>,
    /// If set, the state before the token must be kept as the rollback point. Holds the text that the token shows.
    pub(super) rollback: Option<String>,
}

impl Sequence {
    /// Creates the sequence of a submission that leaves the queue after `passes` passes of the engine.
    pub(super) fn new(submission: Submission, passes: u64, rules: &TextRules) -> Self {
        let Submission { request, sender, interrupt, submitted, span, submitted_at, tenant, advance } = submission;
        let waited = passes.saturating_sub(submitted_at);
        let Request { prompt, generation, mut output, kind, snapshot, keeper } = request;
        if kind != TextKind::Continuation {
            // The answer may complete a character that the prompt has begun.
            output.detokenizer = rules.vocabulary.detokenizer_after(&prompt.last_tokens, !prompt.is_whole());
        }
        let events = EventSender::new(sender);
        let (admitted, first_token) = (Instant::now(), None);
        let since = passes;
        let client =
            Client { events, interrupt, span, tenant, advance, since, waited, submitted, admitted, first_token };
        let position = prompt.start.as_deref().map_or(Position::default(), Position::of);
        let phase = Phase::AwaitPrompt;
        let mut sequence = Self {
            phase,
            prompt,
            position,
            unread: Vec::new(),
            retokenized: Vec::new(),
            generation,
            output,
            kind,
            snapshot,
            keeper,
            rollback: None,
            drafts: None,
            client,
        };
        if kind == TextKind::Continuation && sequence.is_unsettled() {
            let start = sequence.prompt.start.as_deref();
            sequence.rollback = start.and_then(|start| Rollback::before(start, rules));
        }
        sequence.start_reading();
        sequence
    }

    /// Makes this request read its prompt itself.
    pub(super) fn start_reading(&mut self) {
        self.phase = if self.prompt.source.is_empty() { self.reading_from(0) } else { Phase::ReadSource };
    }

    /// Returns the phase in which token `next` of the input is read next.
    pub(super) fn reading_from(&self, next: usize) -> Phase {
        let input = &self.prompt.input;
        if next + 1 >= input.len() {
            Phase::Decode { pending: input.last().copied() }
        } else if self.prompt.logprobs.is_some() {
            Phase::ScorePrompt { next }
        } else {
            Phase::Prefill { next }
        }
    }

    /// Number of tokens that can be read between two decode steps: the whole source; at most `longest` tokens of the
    /// input, without its last token and up to where a snapshot is taken; or at most `longest` unread tokens.
    pub(super) fn next_chunk(&self, longest: usize) -> usize {
        match self.phase {
            Phase::ReadSource => self.prompt.source.len(),
            Phase::Prefill { next } => {
                let mark = self.prompt.mark.filter(|mark| *mark > next);
                (mark.unwrap_or(self.prompt.input.len() - 1) - next).min(longest)
            }
            Phase::ReadForced { .. } | Phase::ReadBack => self.unread.len().min(longest),
            Phase::AwaitPrompt | Phase::ScorePrompt { .. } | Phase::Decode { .. } => 0,
        }
    }

    /// Whether the prompt has been read, except for its last token.
    pub(super) fn has_read_prompt(&self) -> bool {
        matches!(self.phase, Phase::Decode { .. } | Phase::ReadForced { .. } | Phase::ReadBack)
    }

    /// Whether the next decode step with this sequence reads the last token of the text, so that a token is chosen
    /// after it.
    pub(super) fn is_generating(&self) -> bool {
        matches!(self.phase, Phase::Decode { .. }) && self.unread.is_empty()
    }

    /// Returns the token that the next decode step reads; `None` while chunks are read or the reader is too far behind.
    pub(super) fn next_token(&self) -> Option<u32> {
        match self.phase {
            Phase::ScorePrompt { next } => self.prompt.input.get(next).copied(),
            Phase::Decode { pending } => {
                self.unread.first().copied().or(pending).filter(|_| !self.client.events.is_full())
            }
            Phase::AwaitPrompt
            | Phase::ReadSource
            | Phase::Prefill { .. }
            | Phase::ReadForced { .. }
            | Phase::ReadBack => None,
        }
    }

    /// Returns the pending token.
    pub(super) fn pending(&self) -> Option<u32> {
        match self.phase {
            Phase::Decode { pending } => pending,
            Phase::ReadForced { pending } => Some(pending),
            Phase::AwaitPrompt
            | Phase::ReadSource
            | Phase::Prefill { .. }
            | Phase::ScorePrompt { .. }
            | Phase::ReadBack => None,
        }
    }

    /// Adds the token sampled after the pending one, and its text. The state has read the pending token by now.
    ///
    /// # Errors
    /// The text cannot follow its grammar any further.
    pub(super) fn accept(
        &mut self,
        choice: Choice,
        rules: &TextRules,
        buffers: &mut TextBuffers,
    ) -> Result<Accepted, SequenceError> {
        if let Some(read) = self.pending() {
            self.position.advance(&[read]);
        }
        self.add(choice, rules, buffers)
    }

    /// Takes back the last token, which has ended the text or was part of its stop string.
    pub(super) fn take_back(&mut self, token: u32) {
        self.generation.sampler.take_back(token);
        if let Some(drafts) = &mut self.drafts {
            drafts.take_back();
        }
    }

    /// Notes tokens that the state has read in place of those taken back.
    pub(super) fn replace(&mut self, tokens: &[u32]) {
        self.generation.sampler.observe_prompt(tokens);
        if let Some(drafts) = &mut self.drafts {
            tokens.iter().copied().for_each(|token| drafts.push(token));
        }
    }

    /// Adds a token and its text.
    ///
    /// # Errors
    /// The text cannot follow its grammar any further.
    pub(super) fn add(
        &mut self,
        choice: Choice,
        rules: &TextRules,
        buffers: &mut TextBuffers,
    ) -> Result<Accepted, SequenceError> {
        let Choice { token, logprobs } = choice;
        if let Some(drafts) = &mut self.drafts {
            drafts.push(token);
        }
        self.phase = Phase::Decode { pending: Some(token) };
        self.generation.generated += 1;
        self.client.first_token.get_or_insert_with(Instant::now);
        let carried = self.output.start_token(buffers);
        let ending = self.ending(token, rules, buffers)?;
        let rollback = self.track_rollback(token, &buffers.text, carried);
        self.client.events.push(token, &buffers.text, logprobs);
        Ok(Accepted { ending, rollback })
    }

    /// Adds the text that `token`, the last one sampled, shows. Returns how the text ends with it, if it does.
    fn ending(
        &mut self,
        token: u32,
        rules: &TextRules,
        buffers: &mut TextBuffers,
    ) -> Result<Option<Ending>, SequenceError> {
        let Generation { stop, generated, guide, .. } = &mut self.generation;
        let may_end = stop.may_end_at(*generated);
        let mut ending = stop.ending(token, &rules.eos);
        if ending.is_none() {
            let stopped = self.output.push(rules.vocabulary.bytes(token), may_end, buffers);
            let complete = guide.as_mut().map(|guide| guide.accept(token)).transpose()?.unwrap_or(false);
            if stopped {
                return Ok(Some(Ending::StopString));
            }
            if !complete && (self.generation.wants_tokens() || self.can_be_continued()) {
                // What is held back stays held back for the next token, or the next turn.
                return Ok((!self.generation.wants_tokens()).then_some(Ending::Length));
            }
            ending = Some(if complete { Ending::Grammar } else { Ending::Length });
        }
        Ok(if self.output.close(may_end, buffers) { Some(Ending::StopString) } else { ending })
    }

    /// Whether a next turn can continue the text where it ends: it belongs to a conversation, and its state is kept.
    fn can_be_continued(&self) -> bool {
        self.kind != TextKind::Completion && self.snapshot
    }

    /// Whether a stop string rolls the text back or still may, if that matters for the snapshot at the end.
    fn is_unsettled(&self) -> bool {
        self.wants_end() && self.output.is_unsettled()
    }

    /// Whether a snapshot is needed at the end of the text.
    pub(super) fn wants_end(&self) -> bool {
        self.snapshot || self.keeper.as_ref().is_some_and(|keeper| keeper.end)
    }

    /// Adds a token to those since the rollback point. If a new rollback point is needed, returns the text that the
    /// token shows instead. The first `carried` bytes of `text` come from earlier tokens.
    fn track_rollback(&mut self, token: u32, text: &str, carried: usize) -> Option<String> {
        let unsettled = self.is_unsettled();
        match self.rollback.take().filter(|rollback| unsettled && !rollback.is_full()) {
            Some(mut rollback) => {
                rollback.tokens.push(token);
                rollback.shown.push_str(text);
                self.rollback = Some(rollback);
                None
            }
            None => unsettled.then(|| text[carried..].to_owned()),
        }
    }

    /// Sets the rollback point before the pending token, which shows `shown`.
    pub(super) fn set_rollback(&mut self, state: Vec<f32>, shown: String) {
        let tokens = self.pending().into_iter().collect();
        self.rollback = Some(Rollback { state, position: self.position, tokens, shown });
    }

    /// Returns the answer at the end of a turn; `None` if there is none.
    pub(super) fn answer(&self, open: bool) -> Option<Answer> {
        let answers = match self.kind {
            TextKind::Completion => false,
            // Even if interrupted before its first token: the prompt has opened the answer.
            TextKind::Turn => self.generation.max_tokens > 0,
            TextKind::Continuation => true,
        };
        answers.then(|| self.output.answer(open))
    }

    /// Returns the result of a text that has ended, without its snapshot.
    pub(super) fn finish(&self, ending: Ending) -> Finish {
        let now = Instant::now();
        let Client { waited, submitted, admitted, first_token, .. } = self.client;
        let first_token = first_token.unwrap_or(now);
        Finish {
            reason: ending.reason(),
            stop: ending.cause(&self.output.stops),
            cumulative_logprob: self.generation.logprobs.as_ref().map(Logprobs::sum),
            prompt_tokens: self.prompt.tokens,
            completion_tokens: self.generation.generated,
            timings: Timings {
                queue: admitted - submitted,
                prefill: first_token - admitted,
                decode: now - first_token,
                queue_steps: waited,
            },
            drafts: self.drafts.as_ref().map(|drafts| drafts.counts).unwrap_or_default(),
            retokenized: self.retokenized.clone(),
            snapshot: None,
        }
    }
}
