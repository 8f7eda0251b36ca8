//! The [`LanguageModel`] that is served on a CUDA device: a decoder, and its pool of states in the device's memory.

use std::ops::Range;
use std::sync::Arc;

use tidegate_model::cuda::{CudaDecoder, CudaPool};
use tidegate_model::sampling::{Drawn, Plans};
use tidegate_model::{Denominators, StateType};

use super::{LanguageModel, ModelError, Move};
use crate::session::Snapshot;

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
        let pool = decoder.new_pool(slots, state).map_err(ModelError::new)?;
        Ok(Self { decoder, pool })
    }
}

/// The state of a snapshot, which stays until it is on the device.
struct Held(Arc<Snapshot>);

impl AsRef<[f32]> for Held {
    fn as_ref(&self) -> &[f32] {
        &self.0.state
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
        self.pool.reset(slot).map_err(ModelError::new)
    }

    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError> {
        self.decoder.absorb(ids, &mut self.pool, slot).map_err(ModelError::new)
    }

    fn export(&self, slot: usize) -> Result<Vec<f32>, ModelError> {
        self.pool.export(slot).map_err(ModelError::new)
    }

    fn import(&mut self, slot: usize, state: &[f32], tokens: u64) -> Result<(), ModelError> {
        self.pool.import(slot, state, tokens).map_err(ModelError::new)
    }

    fn begin_export(&mut self, slot: usize) -> Result<Move, ModelError> {
        self.pool.begin_export(slot).map(|()| Move::Coming).map_err(ModelError::new)
    }

    fn begin_import(&mut self, slot: usize, start: &Arc<Snapshot>) -> Result<Move, ModelError> {
        let state = Box::new(Held(Arc::clone(start)));
        self.pool.begin_import(slot, state, start.read).map(|()| Move::Coming).map_err(ModelError::new)
    }

    fn moved(&mut self, slot: usize) -> Result<Move, ModelError> {
        let numbers = self.pool.moved(slot).map_err(ModelError::new)?;
        Ok(numbers.map_or(Move::Coming, Move::Done))
    }

    fn on_arrival(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.pool.on_arrival(wake);
    }

    fn decode(&mut self, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.decoder.decode_into(ids, &mut self.pool, slots, logits).map_err(ModelError::new)
    }

    fn chooses(&self) -> bool {
        true
    }

    fn decode_choosing(
        &mut self,
        ids: &[u32],
        slots: &[usize],
        plan: &mut dyn FnMut(Range<usize>, &mut Plans),
        outcome: (&mut Vec<Drawn>, &mut Vec<f32>),
    ) -> Result<(), ModelError> {
        self.decoder.decode_choosing(ids, &mut self.pool, slots, plan, outcome).map_err(ModelError::new)
    }
}
