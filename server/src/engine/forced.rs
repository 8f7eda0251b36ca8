//! Tokens that a grammar forces: they are taken without a decode step, and read afterwards, all in a chunk or one in each
//! step. The text is that of sampling, which could choose no other tokens.

use tidegate_model::{LanguageModel, ModelError};

use super::error::SequenceError;
use super::output::TextBuffers;
use super::sequence::{Accepted, Phase, Sequence};
use super::text_rules::TextRules;

/// Most tokens that are taken at once. The end of a text may have to read them before the engine does anything else.
const MOST: usize = 64;

impl Sequence {
    /// Takes the token that the grammar forces after the pending one; `None` if it forces none, or if the reader or the
    /// state is too far behind.
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

    /// Lets the unread tokens be read in a chunk.
    pub(super) fn start_reading_forced(&mut self) {
        if let Phase::Decode { pending: Some(pending) } = self.phase {
            self.phase = Phase::ReadForced { pending };
        }
    }

    /// Lets the model read the first `limit` of the unread tokens, or all if they are fewer, and returns how many.
    ///
    /// # Errors
    /// The model failed.
    pub(super) fn read_forced<M: LanguageModel>(
        &mut self,
        model: &mut M,
        slot: usize,
        limit: usize,
    ) -> Result<usize, ModelError> {
        let count = self.unread.len().min(limit);
        if count > 0 {
            model.prefill(&self.unread[..count], slot)?;
            self.forced_were_read(count);
        }
        Ok(count)
    }

    /// Notes that the state has `count` more of the unread tokens.
    pub(super) fn forced_were_read(&mut self, count: usize) {
        self.position.advance(&self.unread[..count]);
        self.unread.drain(..count);
        if let Phase::ReadForced { pending } = self.phase
            && self.unread.is_empty()
        {
            self.phase = Phase::Decode { pending: Some(pending) };
        }
    }
}
