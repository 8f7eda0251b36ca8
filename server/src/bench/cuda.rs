//! A decoder on a CUDA device, to be measured.

use anyhow::{Context, Result};
use tidegate_model::StateType;
use tidegate_model::cuda::{CudaDecoder, CudaPool};

use super::runner::Runner;

/// A decoder and its slots; the device has one lane alone.
pub(super) struct OnCuda {
    decoder: CudaDecoder,
    pool: CudaPool,
}

impl OnCuda {
    pub(super) fn new(decoder: CudaDecoder, slots: usize, state: StateType) -> Result<Self> {
        let pool = decoder.new_pool(slots, state).context("the states cannot be allocated")?;
        Ok(Self { decoder, pool })
    }
}

impl Runner for OnCuda {
    fn weight_bytes(&self) -> usize {
        self.decoder.weight_bytes()
    }

    fn state_bytes(&self) -> usize {
        self.pool.state_bytes()
    }

    fn export(&self, _lane: usize) -> Result<Vec<f32>> {
        Ok(self.pool.export(0)?)
    }

    fn import(&mut self, _lane: usize, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        Ok(self.pool.import(slot, numbers, tokens)?)
    }

    fn reset(&mut self, _lane: usize) -> Result<()> {
        Ok(self.pool.reset(0)?)
    }

    fn absorb(&mut self, _lane: usize, ids: &[u32]) -> Result<()> {
        Ok(self.decoder.absorb(ids, &mut self.pool, 0)?)
    }

    /// As the engine reads a prompt: its last token is a step of decoding, whose logits say that all before is done.
    fn prefill(&mut self, lane: usize, ids: &[u32], logits: &mut Vec<f32>) -> Result<()> {
        let (&last, before) = ids.split_last().context("a prompt has at least one token")?;
        if !before.is_empty() {
            self.absorb(lane, before)?;
        }
        self.decode(lane, &[last], &[0], logits)
    }

    fn decode(&mut self, _lane: usize, ids: &[u32], slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        Ok(self.decoder.decode_into(ids, &mut self.pool, slots, logits)?)
    }
}
