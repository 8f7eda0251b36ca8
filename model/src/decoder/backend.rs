//! Implements [`Backend`] for the decoder.

use super::Decoder;
use crate::config::SourceConfig;
use crate::error::Result;
use crate::runner::Backend;
use crate::state::{HostStates, StatePool};

impl Backend for Decoder {
    type States = HostStates;

    fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    fn eos(&self) -> &[u32] {
        self.config().eos_token_id.as_slice()
    }

    fn source(&self) -> Option<SourceConfig> {
        self.config().source()
    }

    fn weight_bytes(&self) -> usize {
        Decoder::weight_bytes(self)
    }

    fn greatest_maxima(&self) -> Vec<f32> {
        Decoder::greatest_maxima(self)
    }

    fn prefill(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        Decoder::prefill(self, ids, pool, slot)
    }

    fn read_source(&self, ids: &[u32], pool: &mut StatePool, slot: usize) -> Result<()> {
        Decoder::read_source(self, ids, pool, slot)
    }

    fn scores_chunks(&self) -> bool {
        true
    }

    fn prefill_logits(&self, ids: &[u32], pool: &mut StatePool, slot: usize, logits: &mut Vec<f32>) -> Result<()> {
        Decoder::prefill_logits_into(self, ids, pool, slot, logits)
    }

    fn decode_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        Decoder::decode_into(self, ids, pool, slots, logits)
    }

    fn speculates(&self) -> bool {
        Decoder::speculates(self)
    }

    fn verify_into(&self, ids: &[u32], pool: &mut StatePool, slots: &[usize], logits: &mut Vec<f32>) -> Result<()> {
        Decoder::verify_into(self, ids, pool, slots, logits)
    }

    fn keep(&self, pool: &mut StatePool, slot: usize, count: usize) -> Result<()> {
        Decoder::keep(self, pool, slot, count)
    }
}
