//! A decoder and its pool of slots as a [`LanguageModel`], for any device.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::config::SourceConfig;
use crate::error::ModelError;
use crate::language_model::{LONGEST_CHUNK, LanguageModel, SharedState, Transfer};
use crate::memory::Denominators;
use crate::pool::{Pool, SlotStates};
use crate::sampling::{Plans, Sampled};

type Result<T> = std::result::Result<T, ModelError>;

/// A decoder on one kind of device. Methods that read tokens have the errors of [`crate::Decoder::forward`], and also
/// fail when the device does.
pub trait Backend: Send {
    /// The type of its pools' states.
    type States: SlotStates;

    /// Number of tokens in the vocabulary.
    fn vocab_size(&self) -> usize;

    /// The ids that end a text.
    fn eos(&self) -> &[u32];

    /// The source that an encoder-decoder reads; `None` for a decoder-only model.
    fn source(&self) -> Option<SourceConfig> {
        None
    }

    /// The family, if the model runs on candle. Such states differ from those of the native kernels.
    fn candle_family(&self) -> Option<&'static str> {
        None
    }

    /// See [`LanguageModel::longest_chunk`].
    fn longest_chunk(&self) -> usize {
        LONGEST_CHUNK
    }

    /// Bytes of the weights in memory; by default [`Self::weight_bytes`].
    fn resident_bytes(&self) -> usize {
        self.weight_bytes()
    }

    /// Bytes of the matrices that one token reads, each counted once. An embedding that is separate from the output
    /// head does not count, because a token reads only one of its rows.
    fn weight_bytes(&self) -> usize;

    /// The upper bound of each head's key maximum in a state of this decoder: (layers, heads), or empty if heads keep
    /// no maximum. A larger one cannot come from any text, and would outweigh every later key.
    fn greatest_maxima(&self) -> Vec<f32> {
        Vec::new()
    }

    /// Reads tokens into one conversation without computing logits. The bits do not depend on how a text is divided
    /// into calls.
    ///
    /// # Errors
    /// As for all methods that read tokens.
    fn prefill(&self, ids: &[u32], pool: &mut Pool<Self::States>, slot: usize) -> Result<()>;

    /// Reads the source of an encoder-decoder into a slot.
    ///
    /// # Errors
    /// The model has no encoder, or as for all methods that read tokens.
    fn read_source(&self, _ids: &[u32], _pool: &mut Pool<Self::States>, _slot: usize) -> Result<()> {
        Err(ModelError::NoEncoder)
    }

    /// Whether [`Self::prefill_logits`] needs only one pass, instead of another one for the last token.
    fn scores_chunks(&self) -> bool {
        false
    }

    /// Reads tokens (at least one) into one conversation, and replaces `logits` with those after the last one: (vocab).
    ///
    /// # Errors
    /// As for all methods that read tokens.
    fn prefill_logits(
        &self,
        ids: &[u32],
        pool: &mut Pool<Self::States>,
        slot: usize,
        logits: &mut Vec<f32>,
    ) -> Result<()> {
        if let [before @ .., _] = ids
            && !before.is_empty()
        {
            self.prefill(before, pool, slot)?;
        }
        self.decode_into(&ids[ids.len().saturating_sub(1)..], pool, &[slot], logits)
    }

    /// Reads one token into each slot, and replaces `logits` with (rows, vocab), row-major. A row's logits do not
    /// depend on the other rows and slots.
    ///
    /// # Errors
    /// As for all methods that read tokens.
    fn decode_into(
        &self,
        ids: &[u32],
        pool: &mut Pool<Self::States>,
        slots: &[usize],
        logits: &mut Vec<f32>,
    ) -> Result<()>;

    /// See [`LanguageModel::speculates`].
    fn speculates(&self) -> bool {
        false
    }

    /// See [`LanguageModel::verify`].
    ///
    /// # Errors
    /// The decoder cannot verify drafts, or as for all methods that read tokens.
    fn verify_into(
        &self,
        _ids: &[u32],
        _pool: &mut Pool<Self::States>,
        _slots: &[usize],
        _logits: &mut Vec<f32>,
    ) -> Result<()> {
        Err(ModelError::NoSpeculation)
    }

    /// See [`LanguageModel::keep`].
    ///
    /// # Errors
    /// The slot has fewer than `count` drafts, or the device failed.
    fn keep(&self, _pool: &mut Pool<Self::States>, _slot: usize, _count: usize) -> Result<()> {
        Err(ModelError::NoSpeculation)
    }

    /// Whether [`Self::decode_and_sample`] samples on the device.
    fn samples(&self) -> bool {
        false
    }

    /// See [`LanguageModel::decode_and_sample`].
    ///
    /// # Errors
    /// The device cannot sample, `plan` has added the wrong number of rows, or as for all methods that read tokens.
    fn decode_and_sample(
        &self,
        _ids: &[u32],
        _pool: &mut Pool<Self::States>,
        _slots: &[usize],
        _plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        _outcome: (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> Result<()> {
        Err(ModelError::NoSampler)
    }
}

/// A decoder with a pool of slots. `D` points to the decoder, which several runners may share.
pub struct ModelRunner<B: Backend, D: Deref<Target = B> = Box<B>> {
    decoder: D,
    pool: Pool<B::States>,
}

impl<B: Backend> ModelRunner<B> {
    /// Combines a decoder with a pool that it has created.
    pub fn new(decoder: B, pool: Pool<B::States>) -> Self {
        Self { decoder: Box::new(decoder), pool }
    }
}

impl<B: Backend> ModelRunner<B, Arc<B>> {
    /// Combines a decoder that other runners use as well with a pool that it has created.
    pub fn shared(decoder: Arc<B>, pool: Pool<B::States>) -> Self {
        Self { decoder, pool }
    }
}

impl<B: Backend, D: Deref<Target = B> + Send> LanguageModel for ModelRunner<B, D> {
    fn vocab_size(&self) -> usize {
        self.decoder.vocab_size()
    }

    fn slots(&self) -> usize {
        self.pool.slots()
    }

    fn slot_bytes(&self) -> usize {
        self.pool.state_bytes()
    }

    fn denominators(&self) -> Denominators {
        self.pool.denominators()
    }

    fn is_lost(&self) -> bool {
        self.pool.is_lost()
    }

    fn reset(&mut self, slot: usize) -> Result<()> {
        self.pool.reset(slot)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>> {
        self.pool.export(slot)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<()> {
        self.pool.import(slot, state, tokens)
    }

    fn start_export(&mut self, slot: usize) -> Result<Transfer> {
        self.pool.start_export(slot)
    }

    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer> {
        self.pool.start_import(slot, state, tokens)
    }

    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer> {
        self.pool.poll_transfer(slot)
    }

    fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.pool.on_transfer_end(wake);
    }

    fn source_start(&self) -> Option<u32> {
        self.decoder.source().map(|source| source.start)
    }

    fn read_source(&mut self, ids: &[u32], slot: usize) -> Result<()> {
        self.decoder.read_source(ids, &mut self.pool, slot)
    }

    fn longest_chunk(&self) -> usize {
        self.decoder.longest_chunk()
    }

    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<()> {
        self.decoder.prefill(ids, &mut self.pool, slot)
    }

    fn scores_chunks(&self) -> bool {
        self.decoder.scores_chunks()
    }

    fn prefill_logits(&mut self, ids: &[u32], slot: usize, logits: &mut Vec<f32>) -> Result<()> {
        self.decoder.prefill_logits(ids, &mut self.pool, slot, logits)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        self.decoder.decode_into(ids, &mut self.pool, slots, logits)
    }

    fn speculates(&self) -> bool {
        self.decoder.speculates()
    }

    fn verify(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        self.decoder.verify_into(ids, &mut self.pool, slots, logits)
    }

    fn keep(&mut self, slot: usize, count: usize) -> Result<()> {
        self.decoder.keep(&mut self.pool, slot, count)
    }

    fn samples(&self) -> bool {
        self.decoder.samples()
    }

    fn decode_and_sample(
        &mut self,
        ids: &[u32],
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        outcome: (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> Result<()> {
        self.decoder.decode_and_sample(ids, &mut self.pool, slots, plan, outcome)
    }
}
