//! The interface between a server and a language model, independent of how the model works.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{ModelError, SlotError};
use crate::memory::Denominators;
use crate::sampling::{Plans, Sampled};

/// The longest prefill call that makes sense while other requests wait: longer calls gain nothing.
pub(crate) const LONGEST_CHUNK: usize = 256;

/// State elements that several threads can share.
pub type SharedState = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// The progress of a transfer of a slot's state.
#[derive(Debug)]
pub enum Transfer {
    /// It has ended: an export returns the state's elements, an import returns none.
    Done(Vec<f32>),
    /// It is in progress until [`LanguageModel::poll_transfer`] says otherwise. Until then no other call may name the
    /// slot; calls on other slots do not wait for it.
    Pending,
}

/// A model with a fixed number of slots, each of which holds the state of one conversation.
pub trait LanguageModel: Send {
    /// Number of tokens in the vocabulary, which is the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Number of conversations that the model can hold at once.
    fn slots(&self) -> usize;

    /// Bytes of one slot's state in the memory where states are kept; 0 if unknown.
    fn slot_bytes(&self) -> usize {
        0
    }

    /// Counts the attention denominators since the model was created; zeros if attention has none.
    fn denominators(&self) -> Denominators {
        Denominators::default()
    }

    /// Whether the device has failed permanently: every later call in this process fails too.
    fn is_lost(&self) -> bool {
        false
    }

    /// Resets a slot to an empty conversation.
    ///
    /// # Errors
    /// The device failed.
    fn reset(&mut self, slot: usize) -> Result<(), ModelError>;

    /// Returns a copy of a slot's state, for [`Self::import`].
    ///
    /// # Errors
    /// The device failed, or a failed step left the state incomplete.
    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError>;

    /// Replaces a slot's state with `state`, which has read `tokens` tokens.
    ///
    /// # Errors
    /// The device failed, or the state does not belong to this model.
    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError>;

    /// Starts an [`Self::export`]. Where the device allows it, other slots can be used meanwhile.
    ///
    /// # Errors
    /// As for [`Self::export`]; then no transfer is in progress.
    fn start_export(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        self.export(slot).map(Transfer::Done)
    }

    /// Starts an [`Self::import`]. Where the device allows it, other slots can be used meanwhile.
    ///
    /// # Errors
    /// As for [`Self::import`]; then no transfer is in progress.
    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer, ModelError> {
        self.import(slot, (*state).as_ref(), tokens).map(|()| Transfer::Done(Vec::new()))
    }

    /// Returns the progress of the transfer of a slot's state, without waiting.
    ///
    /// # Errors
    /// As for the call that started the transfer; then the transfer has ended.
    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        Err(ModelError::Slot { slot, reason: SlotError::NoTransfer })
    }

    /// Sets a callback that runs, on any thread, whenever a pending transfer ends. Call it before the first transfer.
    fn on_transfer_end(&mut self, _wake: Arc<dyn Fn() + Send + Sync>) {}

    /// The token that every text of an encoder-decoder starts with. `None` for a decoder-only model, whose text starts
    /// with the prompt. A slot of an encoder-decoder reads text only after [`Self::read_source`].
    fn source_start(&self) -> Option<u32> {
        None
    }

    /// Reads a source (at least one token) into a slot, replacing the slot's contents. The text that follows starts at
    /// position 0.
    ///
    /// # Errors
    /// The device failed, the source is too long, or the model has no encoder.
    fn read_source(&mut self, _ids: &[u32], _slot: usize) -> Result<(), ModelError> {
        Err(ModelError::NoEncoder)
    }

    /// The most tokens that one [`Self::prefill`] should read while other requests wait.
    fn longest_chunk(&self) -> usize {
        LONGEST_CHUNK
    }

    /// Reads `ids` (at least one) into a slot without computing logits. The results do not depend on how a text is
    /// divided into calls, nor on whether a token is read by this call or by [`Self::decode`].
    ///
    /// # Errors
    /// The device failed.
    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError>;

    /// Whether the model can return the logits after a chunk, with [`Self::prefill_logits`].
    fn scores_chunks(&self) -> bool {
        false
    }

    /// Reads `ids` (at least one) into a slot in one pass, and replaces `logits` with those after the last token:
    /// (vocab), with the same bits as those of [`Self::decode`].
    ///
    /// # Errors
    /// The device failed, or the model cannot return logits after a chunk.
    fn prefill_logits(&mut self, _ids: &[u32], _slot: usize, _logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Err(ModelError::other("the model gives no logits after a chunk"))
    }

    /// Reads one token into each of `slots`, which are distinct and ascending. Replaces `logits` with (rows, vocab),
    /// row-major. The caller keeps the buffer between steps to reuse its memory.
    ///
    /// # Errors
    /// The device failed.
    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError>;

    /// Whether the model can verify draft tokens, with [`Self::verify`].
    fn speculates(&self) -> bool {
        false
    }

    /// Reads the same number of draft tokens (at least one) into each of `slots`, which are distinct and ascending, in
    /// one step. ids: (rows, time), row-major. Replaces `logits` with (rows, time, vocab), which are those that
    /// [`Self::decode`] would give token by token. Until [`Self::keep`] or [`Self::reset`], no other call may name
    /// these slots.
    ///
    /// # Errors
    /// The device failed, or the model cannot verify drafts.
    fn verify(&mut self, _ids: &[u32], _slots: &[usize], _logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Err(ModelError::NoSpeculation)
    }

    /// Appends the first `count` (at least one) of the draft tokens of a slot's last [`Self::verify`] to its text. The
    /// state is as if no other drafts had been read.
    ///
    /// # Errors
    /// The device failed, or there are fewer than `count` drafts.
    fn keep(&mut self, _slot: usize, _count: usize) -> Result<(), ModelError> {
        Err(ModelError::NoSpeculation)
    }

    /// Whether the model can sample where the logits are computed, with [`Self::decode_and_sample`].
    fn samples(&self) -> bool {
        false
    }

    /// Reads one token into each of `slots`, like [`Self::decode`], and samples each row's next token according to its
    /// plan. Replaces `outcome` with one entry per row, and the logits with those of rows that have no plan: (rows,
    /// vocab).
    ///
    /// `plan` is called while the step runs, for some of the rows at a time, in order. It adds as many rows to the
    /// [`Plans`].
    ///
    /// # Errors
    /// The device failed, or the model cannot sample.
    fn decode_and_sample(
        &mut self,
        _ids: &[u32],
        _slots: &[usize],
        _plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        _outcome: (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> Result<(), ModelError> {
        Err(ModelError::NoSampler)
    }
}
