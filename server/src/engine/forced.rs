//! Tokens that a grammar forces. They are accepted without a decode step and read afterwards, either all in one chunk
//! or one per step. The text is the same as with sampling, which could choose no other tokens.

use tidegate_model::{LanguageModel, ModelError};

use super::error::SequenceError;
use super::output::TextBuffers;
use super::sequence::{Accepted, Phase, Sequence};
use super::text_rules::TextRules;

/// Most tokens that are accepted at once: at the end of a text, the engine may have to read them before it does
/// anything else.
pub(super) const MOST: usize = 64;

impl Sequence {
    /// Accepts the token that the grammar forces after the pending one. Returns `None` if it forces none, if the reader
    /// is too far behind, or if too many tokens are unread.
    ///
    /// # Errors
    /// The text cannot follow its grammar any further.
    pub(super) fn take_forced(
        &mut self,
        rules: &TextRules,
        buffers: &mut TextBuffers,
    ) -> Result<Option<Accepted>, SequenceError> {
        let Some(pending) = self.pending() else { return Ok(None) };
        if self.unread.len() >= MOST || self.client.events.is_full() {
            return Ok(None);
        }
        let Some(token) = self.generation.next_forced() else { return Ok(None) };
        let choice = self.generation.accept_known(token);
        self.unread.push(pending);
        self.add(choice, rules, buffers).map(Some)
    }

    /// Switches to reading the unread tokens in a chunk.
    pub(super) fn start_reading_forced(&mut self) {
        if let Phase::Decode { pending: Some(pending) } = self.phase {
            self.phase = Phase::ReadForced { pending };
        }
    }

    /// Makes the model read the first `limit` unread tokens, or all if there are fewer, and returns how many it has
    /// read.
    ///
    /// # Errors
    /// The model failed.
    pub(super) fn read_unread<M: LanguageModel>(
        &mut self,
        model: &mut M,
        slot: usize,
        limit: usize,
    ) -> Result<usize, ModelError> {
        let count = self.unread.len().min(limit);
        if count > 0 {
            model.prefill(&self.unread[..count], slot)?;
            self.unread_were_read(count);
        }
        Ok(count)
    }

    /// Notes that the state has read `count` more of the unread tokens.
    pub(super) fn unread_were_read(&mut self, count: usize) {
        self.position.advance(&self.unread[..count]);
        self.unread.drain(..count);
        if let Phase::ReadForced { pending } = self.phase
            && self.unread.is_empty()
        {
            self.phase = Phase::Decode { pending: Some(pending) };
        }
    }
}
