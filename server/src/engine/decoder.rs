//! The [`LanguageModel`] that is served on the CPU: an RFA-Gate decoder, alone or with an encoder, and its pool of states.

use tidegate_model::{Decoder, Denominators, LanguageModel, ModelError, PoolOptions, StatePool, StateType};

/// A decoder with its slots.
pub struct DecoderModel {
    decoder: Decoder,
    pool: StatePool,
}

impl DecoderModel {
    /// A model with `slots` empty slots, whose states are held as `state`.
    ///
    /// # Errors
    /// The states cannot be allocated.
    pub fn new(decoder: Decoder, slots: usize, state: StateType) -> Result<Self, ModelError> {
        let options = PoolOptions { state, ..PoolOptions::new(slots) };
        let pool = decoder.new_pool_with(options)?;
        Ok(Self { decoder, pool })
    }
}

impl LanguageModel for DecoderModel {
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

    fn reset(&mut self, slot: usize) -> Result<(), ModelError> {
        Ok(self.pool.reset(slot)?)
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        Ok(self.decoder.absorb(ids, &mut self.pool, slot)?)
    }

    fn source_start(&self) -> Option<u32> {
        self.decoder.config().source().map(|source| source.start)
    }

    fn read_source(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        Ok(self.decoder.read_source(ids, &mut self.pool, slot)?)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.pool.export(slot)?)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        Ok(self.pool.import(slot, state, tokens)?)
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        Ok(self.decoder.decode_into(ids, &mut self.pool, slots, logits)?)
    }
}
