//! How a sequence gets through its prompt: in chunks, as a source, by steps that score it, or by taking over what
//! another request has read.

use std::sync::Arc;

use tidegate_model::{LanguageModel, ModelError};

use super::event::Event;
use super::prompt::{ReadPrompt, SharedPrompt};
use super::rollback::Position;
use super::sequence::{Phase, Sequence};
use crate::session::{History, Snapshot};

impl Sequence {
    /// Makes the model read the next chunk, and returns its length. A source is read as a whole, because each of its
    /// tokens is encoded in view of all others; other tokens are read at most `limit` at a time.
    ///
    /// # Errors
    /// The model failed.
    pub(super) fn read_chunk<M: LanguageModel>(
        &mut self,
        model: &mut M,
        slot: usize,
        limit: usize,
    ) -> Result<usize, ModelError> {
        match self.phase {
            Phase::ReadSource => {
                let source = &self.prompt.source;
                model.read_source(source, slot)?;
                let length = source.len();
                self.position = Position { read: length as u64, history: History::of_source(source) };
                self.prompt.computed = true;
                self.phase = self.reading_from(0);
                Ok(length)
            }
            Phase::Prefill { next } => {
                let length = self.next_chunk(limit);
                model.prefill(&self.prompt.input[next..next + length], slot)?;
                self.advance(next, length);
                Ok(length)
            }
            Phase::ReadForced { .. } | Phase::ReadBack => self.read_unread(model, slot, limit),
            Phase::AwaitPrompt | Phase::ScorePrompt { .. } | Phase::Decode { .. } => Ok(0),
        }
    }

    /// Notes that the state has read `count` more tokens of the input, starting with token `next`.
    pub(super) fn advance(&mut self, next: usize, count: usize) {
        self.position.advance(&self.prompt.input[next..next + count]);
        self.prompt.computed = true;
        self.phase = self.reading_from(next + count);
    }

    /// Notes that a step has read a token of the prompt, and scores the next token with the step's logits (vocab).
    ///
    /// # Errors
    /// No logit is a number.
    pub(super) fn score_prompt(&mut self, logits: &[f32]) -> Result<(), ModelError> {
        if !logits.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            return Err(ModelError::other("no logit is a number"));
        }
        let Phase::ScorePrompt { next } = self.phase else { return Ok(()) };
        if let (Some(logprobs), Some(token)) = (&mut self.prompt.logprobs, self.prompt.input.get(next + 1)) {
            logprobs.push(logits, *token);
        }
        self.advance(next, 1);
        Ok(())
    }

    /// Whether a snapshot is to be taken here, within the prompt.
    pub(super) fn is_at_mark(&self) -> bool {
        matches!(self.phase, Phase::Prefill { next } if self.prompt.mark == Some(next))
    }

    /// Whether a snapshot is needed after the prompt, for requests with the same beginning or the same prompt.
    pub(super) fn wants_prompt_end(&self) -> bool {
        self.prompt.computed && self.shares_prompt_end()
    }

    fn shares_prompt_end(&self) -> bool {
        // A request that generates nothing takes its snapshot at the end of the text, which is the same place.
        let keeps = self.keeper.is_some() && self.generation.wants_tokens();
        keeps || self.prompt.shared.as_ref().is_some_and(SharedPrompt::has_others)
    }

    /// Returns how many known tokens the state has not read, if one pass may read them all and choose the next token.
    /// It may if a next token is wanted, nobody needs the state before the last known token, and the reader is not too
    /// far behind.
    pub(super) fn known_to_the_end(&self) -> Option<usize> {
        match self.phase {
            _ if self.client.interrupt.is_requested() => None,
            Phase::ReadForced { .. } if !self.client.events.is_full() => Some(self.unread.len() + 1),
            Phase::Prefill { next } if self.generation.wants_tokens() && !self.shares_prompt_end() => {
                Some(self.prompt.input.len() - next)
            }
            _ => None,
        }
    }

    /// Passes the snapshot after the prompt to the requests that need it.
    pub(super) fn hand_over_prompt(&mut self, end: Snapshot) {
        let end = Arc::new(end);
        self.pass_on(&end);
        if let Some(shared) = self.prompt.shared.as_ref().filter(|shared| shared.has_others()) {
            shared.hand_over(ReadPrompt { end, logprobs: self.prompt.logprobs.clone() });
        }
    }

    /// Passes a snapshot to the receiver of snapshots for other requests.
    pub(super) fn pass_on(&self, snapshot: &Arc<Snapshot>) {
        if let Some(keeper) = &self.keeper {
            keeper.taker.take(snapshot);
        }
    }

    /// Sends the log probabilities of the prompt, if they were requested.
    pub(super) fn send_prompt_logprobs(&mut self) {
        if let Some(logprobs) = self.prompt.logprobs.take() {
            self.client.events.set_prompt(Event::PromptLogprobs(logprobs.into_all()));
        }
    }

    /// Continues after the prompt if another request has read it. The slot must already hold the state there.
    pub(super) fn take_over_prompt(&mut self) {
        let Some(shared) = self.prompt.shared.take_if(|shared| shared.read().is_some()) else { return };
        let Some(prompt) = shared.read() else { return };
        self.position = Position::of(&prompt.end);
        self.prompt.logprobs.clone_from(&prompt.logprobs);
        self.phase = Phase::Decode { pending: self.prompt.input.last().copied() };
    }
}
