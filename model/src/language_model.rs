//! What a server needs from a language model, and nothing about how one works.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{ModelError, SlotError};
use crate::memory::Denominators;
use crate::sampling::{Plans, Sampled};

/// Tokens of a prompt that one call should read where others wait: longer calls gain nothing.
pub(crate) const LONGEST_CHUNK: usize = 256;

/// The numbers of a state that several threads may hold.
pub type SharedState = Arc<dyn AsRef<[f32]> + Send + Sync>;

/// How far the transfer of a slot's state is.
#[derive(Debug)]
pub enum Transfer {
    /// It has ended: an export gives the numbers of the state, an import gives none.
    Done(Vec<f32>),
    /// It is in progress until [`LanguageModel::poll_transfer`] says otherwise. Until then no other call may name the
    /// slot, and calls on other slots do not wait for it.
    Pending,
}

/// A model with a fixed number of slots, each of which holds the state of one conversation.
pub trait LanguageModel: Send {
    /// Tokens in the vocabulary: the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Conversations that can be held at once.
    fn slots(&self) -> usize;

    /// Bytes that the state of one slot takes where states are held; 0 if unknown.
    fn slot_bytes(&self) -> usize {
        0
    }

    /// Denominators that attention has divided by since the model was created; zeros if it has none.
    fn denominators(&self) -> Denominators {
        Denominators::default()
    }

    /// Whether the device has failed for good: every later call in this process fails too.
    fn is_lost(&self) -> bool {
        false
    }

    /// Empties a slot.
    ///
    /// # Errors
    /// The device failed.
    fn reset(&mut self, slot: usize) -> Result<(), ModelError>;

    /// A copy of the numbers of a slot's state, for [`Self::import`].
    ///
    /// # Errors
    /// The device failed, or a failed step left the state incomplete.
    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError>;

    /// Replaces the state of a slot by one that has read `tokens` tokens.
    ///
    /// # Errors
    /// The device failed, or the state is not one of this model's.
    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError>;

    /// Starts an [`Self::export`], during which other slots can be used where the device allows it.
    ///
    /// # Errors
    /// As for [`Self::export`]; then no transfer is in progress.
    fn start_export(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        self.export(slot).map(Transfer::Done)
    }

    /// Starts an [`Self::import`], during which other slots can be used where the device allows it.
    ///
    /// # Errors
    /// As for [`Self::import`]; then no transfer is in progress.
    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer, ModelError> {
        self.import(slot, (*state).as_ref(), tokens).map(|()| Transfer::Done(Vec::new()))
    }

    /// The progress of the transfer of a slot's state; never waits.
    ///
    /// # Errors
    /// As for what was started; then the transfer has ended.
    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        Err(ModelError::Slot { slot, reason: SlotError::NoTransfer })
    }

    /// Sets what is called, on any thread, whenever a pending transfer ends. Must be called before the first transfer.
    fn on_transfer_end(&mut self, _wake: Arc<dyn Fn() + Send + Sync>) {}

    /// The token that every text of an encoder-decoder begins with; `None` for a decoder, whose text begins with the
    /// prompt. A slot of an encoder-decoder reads text only after [`Self::read_source`].
    fn source_start(&self) -> Option<u32> {
        None
    }

    /// Reads a source (at least one token) into a slot, replacing what was there. The text that follows starts from its
    /// first token.
    ///
    /// # Errors
    /// The device failed, the source is too long, or the model has no encoder.
    fn read_source(&mut self, _ids: &[u32], _slot: usize) -> Result<(), ModelError> {
        Err(ModelError::NoEncoder)
    }

    /// The most tokens that one [`Self::prefill`] should read while other texts wait.
    fn longest_chunk(&self) -> usize {
        LONGEST_CHUNK
    }

    /// Reads `ids` (at least one) into a slot without computing logits. The results do not depend on how a text is
    /// divided into calls, nor on whether this or [`Self::decode`] reads a token.
    ///
    /// # Errors
    /// The device failed.
    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError>;

    /// Whether the model gives the logits after a chunk, by [`Self::prefill_logits`].
    fn scores_chunks(&self) -> bool {
        false
    }

    /// Reads `ids` (at least one) into a slot in one pass, and replaces `logits` by those after the last of them: (vocab), of
    /// the bits of [`Self::decode`].
    ///
    /// # Errors
    /// The device failed, or the model does not score chunks.
    fn prefill_logits(&mut self, _ids: &[u32], _slot: usize, _logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Err(ModelError::other("the model gives no logits after a chunk"))
    }

    /// Reads one token into each of `slots`, which are distinct and ascend. Replaces `logits` by (rows, vocab), row by
    /// row; the caller keeps the buffer from step to step to reuse its memory.
    ///
    /// # Errors
    /// The device failed.
    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError>;

    /// Whether the model reads drafts, by [`Self::verify`].
    fn speculates(&self) -> bool {
        false
    }

    /// Reads as many drafts (at least one) into each of `slots`, which are distinct and ascend, in one step. ids: (rows,
    /// time), row by row. Replaces `logits` by (rows, time, vocab), those that [`Self::decode`] would give token by token.
    /// Until [`Self::keep`] or [`Self::reset`] no other call may name these slots.
    ///
    /// # Errors
    /// The device failed, or the model reads no drafts.
    fn verify(&mut self, _ids: &[u32], _slots: &[usize], _logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Err(ModelError::NoSpeculation)
    }

    /// Makes the first `count` (at least one) of the drafts that the last [`Self::verify`] has read into a slot a part of
    /// its text. The state is as if no others had been read.
    ///
    /// # Errors
    /// The device failed, or there are not so many drafts.
    fn keep(&mut self, _slot: usize, _count: usize) -> Result<(), ModelError> {
        Err(ModelError::NoSpeculation)
    }

    /// Whether the model samples where the logits are, by [`Self::decode_and_sample`].
    fn samples(&self) -> bool {
        false
    }

    /// Reads one token into each of `slots`, as [`Self::decode`], and samples the rows' next tokens as planned. Replaces
    /// `outcome` by that of each row, and the logits of the rows without a plan: (rows, vocab).
    ///
    /// `plan` is called while the step runs, for some of the rows at a time, in order; it adds as many to the [`Plans`].
    ///
    /// # Errors
    /// The device failed, or the model does not sample.
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
