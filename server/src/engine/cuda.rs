//! The [`LanguageModel`] that is served on a CUDA device: a decoder, and its pool of states in the device's memory.

use std::ops::Range;
use std::sync::Arc;

use tidegate_model::cuda::{CudaDecoder, CudaPool};
use tidegate_model::sampling::{Plans, Sampled};
use tidegate_model::{Denominators, LanguageModel, ModelError, SharedState, StateType, Transfer};

/// A decoder with its slots.
pub struct CudaModel {
    decoder: CudaDecoder,
    pool: CudaPool,
}

impl CudaModel {
    /// A model with `slots` empty slots, whose states are held as `state`.
    ///
    /// # Errors
    /// The states do not fit into the device's memory.
    pub fn new(decoder: CudaDecoder, slots: usize, state: StateType) -> Result<Self, ModelError> {
        let pool = decoder.new_pool(slots, state)?;
        Ok(Self { decoder, pool })
    }
}

impl LanguageModel for CudaModel {
    fn vocab_size(&self) -> usize {
        self.decoder.config().vocab_size
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

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        Ok(self.pool.reset(slot)?)
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        Ok(self.decoder.absorb(ids, &mut self.pool, slot)?)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.pool.export(slot)?)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        Ok(self.pool.import(slot, state, tokens)?)
    }

    fn start_export(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        Ok(self.pool.start_export(slot).map(|()| Transfer::Pending)?)
    }

    fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer, ModelError> {
        Ok(self.pool.start_import(slot, state, tokens).map(|()| Transfer::Pending)?)
    }

    fn poll_transfer(&mut self, slot: usize) -> Result<Transfer, ModelError> {
        let numbers = self.pool.poll_transfer(slot)?;
        Ok(numbers.map_or(Transfer::Pending, Transfer::Done))
    }

    fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.pool.on_transfer_end(wake);
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Ok(self.decoder.decode_into(ids, &mut self.pool, slots, logits)?)
    }

    fn samples(&self) -> bool {
        true
    }

    fn decode_and_sample(
        &mut self,
        ids: &[u32],
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        outcome: (&mut Vec<Sampled>, &mut Vec<f32>),
    ) -> Result<(), ModelError> {
        Ok(self.decoder.decode_and_sample(ids, &mut self.pool, slots, plan, outcome)?)
    }
}
