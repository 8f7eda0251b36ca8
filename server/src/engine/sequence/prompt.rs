//! How a request comes to the end of its prompt: by chunks, by steps that score it, or by what another has read.

use std::ops::Range;
use std::sync::Arc;

use super::{PROMPT_CHUNK, Sequence};
use crate::engine::event::Event;
use crate::engine::model::ModelError;
use crate::engine::shared::{ReadPrompt, SharedPrompt};
use crate::session::Snapshot;

/// Who reads a request's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum ReadBy {
    /// The request itself.
    Itself,
    /// Another, for which it waits.
    Other,
    /// Another, which has handed it over.
    Past,
}

impl Sequence {
    /// The next piece of the input, all of it but its last token; empty where that has been read.
    pub(in crate::engine) fn next_chunk(&self) -> &[u32] {
        let end = self.input.len().saturating_sub(1);
        let Range { start, end } = self.absorbed..end.min(self.absorbed + PROMPT_CHUNK);
        &self.input[start..end]
    }

    /// Notes that the chunk of [`Self::next_chunk`] is in the state; returns its length.
    pub(in crate::engine) fn chunk_was_read(&mut self) -> usize {
        let length = self.next_chunk().len();
        self.absorb(length);
        length
    }

    pub(super) fn absorb(&mut self, count: usize) {
        self.history = self.history.extended(&self.input[self.absorbed..self.absorbed + count]);
        self.absorbed += count;
        self.read += count as u64;
        if self.next_chunk().is_empty() {
            self.pending_token = self.input.last().copied();
        }
    }

    /// Whether the input has been read, but for its last token.
    pub(in crate::engine) fn is_read(&self) -> bool {
        self.next_chunk().is_empty()
    }

    /// Whether this request has read tokens that were not in the state it began from.
    pub(in crate::engine) fn has_read_more(&self) -> bool {
        self.absorbed > 0 && self.read_by == ReadBy::Itself
    }

    /// Whether the prompt is read by decode steps, each of which scores the token after the one that it reads.
    pub(in crate::engine) fn reads_by_steps(&self) -> bool {
        self.prompt_scores.is_some() && !self.is_read()
    }

    /// Notes that a step has read a token of the prompt; its logits (vocab) score the next.
    ///
    /// # Errors
    /// No logit is a number.
    pub(in crate::engine) fn score_prompt(&mut self, logits: &[f32]) -> Result<(), ModelError> {
        if !logits.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            return Err(ModelError::new("no logit is a number"));
        }
        if let (Some(scores), Some(next)) = (&mut self.prompt_scores, self.input.get(self.absorbed + 1)) {
            scores.push(logits, *next);
        }
        self.absorb(1);
        Ok(())
    }

    /// Whether another request has read the prompt already.
    pub(in crate::engine) fn prompt_is_there(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.read().is_some())
    }

    /// Whether the prompt's end is wanted: by who has asked, or by those who have the same prompt.
    pub(in crate::engine) fn wants_prompt_end(&self) -> bool {
        let others = self.shared.as_ref().is_some_and(SharedPrompt::has_others);
        self.has_read_more() && (self.keep.prompt || others)
    }

    /// Passes the prompt's end on to who wants it.
    pub(in crate::engine) fn prompt_ended(&mut self, end: Snapshot) {
        let end = Arc::new(end);
        if self.keep.prompt {
            self.outlet.of_prompt(Event::Read(Arc::clone(&end)));
        }
        if let Some(shared) = self.shared.as_ref().filter(|shared| shared.has_others()) {
            shared.hand_over(ReadPrompt { end, scores: self.prompt_scores.clone() });
        }
    }

    /// Tells the scores of the prompt, where they were asked for.
    pub(in crate::engine) fn tell_prompt_scores(&mut self) {
        if let Some(scores) = self.prompt_scores.take() {
            self.outlet.of_prompt(Event::PromptLogprobs(scores.into_all()));
        }
    }

    /// Goes on from where another request has read the prompt to; the slot has to have its state.
    pub(in crate::engine) fn take_over(&mut self, prompt: &ReadPrompt) {
        self.absorbed = self.input.len().saturating_sub(1);
        (self.read, self.history) = (prompt.end.read, prompt.end.history);
        self.pending_token = self.input.last().copied();
        self.prompt_scores.clone_from(&prompt.scores);
        (self.shared, self.read_by) = (None, ReadBy::Past);
    }
}
