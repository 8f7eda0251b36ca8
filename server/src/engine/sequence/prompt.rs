//! How a request comes to the end of its prompt: by chunks, as a source, by steps that score it, or by what another has
//! read.

use std::ops::Range;
use std::sync::Arc;

use tidegate_model::{LanguageModel, ModelError};

use super::{PROMPT_CHUNK, Sequence};
use crate::engine::event::Event;
use crate::engine::shared::{ReadPrompt, SharedPrompt};
use crate::session::{History, Snapshot};

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

/// What is read before the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Nothing.
    Absent,
    /// These tokens, which are not in the state yet.
    Unread(Vec<u32>),
    /// A source, which is in the state.
    Read,
}

impl Sequence {
    /// Has the model read the next piece of the prompt, and returns its length: a source as a whole, since each of its
    /// tokens is encoded with all others in view, a text by chunks.
    ///
    /// # Errors
    /// The model failed.
    pub(in crate::engine) fn read_chunk<M: LanguageModel>(
        &mut self,
        model: &mut M,
        slot: usize,
    ) -> Result<usize, ModelError> {
        let Source::Unread(source) = &self.source else {
            let chunk = self.next_chunk();
            model.absorb(chunk, slot)?;
            let length = chunk.len();
            self.absorb(length);
            return Ok(length);
        };
        model.read_source(source, slot)?;
        let length = source.len();
        (self.read, self.history) = (length as u64, History::of_source(source));
        self.source = Source::Read;
        self.absorb(0);
        Ok(length)
    }

    /// The next piece of the input, all of it but its last token; empty where that has been read.
    pub(super) fn next_chunk(&self) -> &[u32] {
        let end = self.input.len().saturating_sub(1);
        let Range { start, end } = self.absorbed..end.min(self.absorbed + PROMPT_CHUNK);
        &self.input[start..end]
    }

    /// Notes that so many tokens more of the input are in the state.
    pub(super) fn absorb(&mut self, count: usize) {
        self.history = self.history.extended(&self.input[self.absorbed..self.absorbed + count]);
        self.absorbed += count;
        self.read += count as u64;
        if self.is_read() {
            self.pending_token = self.input.last().copied();
        }
    }

    /// Whether the source and the input have been read, but for the last token.
    pub(in crate::engine) fn is_read(&self) -> bool {
        !self.has_source_to_read() && self.next_chunk().is_empty()
    }

    /// Whether the next piece of the prompt is a source.
    pub(in crate::engine) fn has_source_to_read(&self) -> bool {
        matches!(self.source, Source::Unread(_))
    }

    /// Whether this request has read tokens that were not in the state it began from.
    pub(in crate::engine) fn has_read_more(&self) -> bool {
        (self.absorbed > 0 || self.source == Source::Read) && self.read_by == ReadBy::Itself
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
            return Err(ModelError::other("no logit is a number"));
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

    /// Goes on from where another request has read the prompt to, if it has; then the slot has to have its state.
    pub(in crate::engine) fn take_over(&mut self) {
        let Some(shared) = self.shared.clone() else { return };
        let Some(prompt) = shared.read() else { return };
        self.absorbed = self.input.len().saturating_sub(1);
        if self.source != Source::Absent {
            self.source = Source::Read;
        }
        (self.read, self.history) = (prompt.end.read, prompt.end.history);
        self.pending_token = self.input.last().copied();
        self.prompt_scores.clone_from(&prompt.scores);
        (self.shared, self.read_by) = (None, ReadBy::Past);
    }
}
