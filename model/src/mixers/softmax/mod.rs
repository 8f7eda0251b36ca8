//! Softmax attention over the last `sliding_window` tokens, with cached keys and values: the baseline for random
//! feature attention, and the mixer of most published checkpoints.

pub mod attend;
pub(crate) mod cache;

use super::cross::CacheReader;
use super::layer::Step;
use super::mixer::{Mixer, Projected};
use crate::config::{ConfigError, DecoderConfig, GivenKeys, PositionEmbedding};
use crate::error;
use crate::memory::StateType;
use crate::weights::{LoadError, TensorList, Weights};

pub use cache::Cache;

/// The softmax mixer of a layer. It has no tensors of its own: all belong to the projections.
#[derive(Debug)]
pub(crate) struct Softmax {
    shape: attend::Shape,
    window: usize,
}

impl Mixer for Softmax {
    type State = Cache;
    type Buffers = attend::AttendBuffers;
    type Source = CacheReader;

    fn name(_: &DecoderConfig) -> &'static str {
        "softmax"
    }

    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> Result<(), ConfigError> {
        (config.gate, config.proj_dim) = (false, 0);
        if given.position_embedding.is_none() {
            config.position_embedding = PositionEmbedding::Rope;
        }
        Ok(())
    }

    fn validate(config: &DecoderConfig) -> Result<(), ConfigError> {
        config.check_window()
    }

    fn features(_: &DecoderConfig) -> usize {
        0
    }

    fn head_numbers(config: &DecoderConfig) -> usize {
        config.window() * Self::cached_numbers(config)
    }

    fn cached_numbers(config: &DecoderConfig) -> usize {
        2 * config.head_dim
    }

    fn tensors(_: &DecoderConfig, _: &mut TensorList) {}

    fn load(config: &DecoderConfig, _: &Weights<'_>) -> Result<Self, LoadError> {
        let shape = attend::Shape { heads: config.num_attention_heads, head_dim: config.head_dim };
        Ok(Self { shape, window: config.window() })
    }

    fn bytes(&self) -> usize {
        0
    }

    fn new_state(&self, slots: usize, state: StateType) -> Cache {
        Cache::zeros(slots, self.shape.heads, self.window, self.shape.head_dim, state)
    }

    fn mix(
        &self,
        step: &mut Step<'_>,
        Projected { qkv, .. }: Projected<'_>,
        cache: &mut Cache,
        buffers: &mut attend::AttendBuffers,
        h: &mut [f32],
    ) -> error::Result<()> {
        let inputs = attend::Inputs { qkv, slots: step.rows.slots, positions: step.rows.positions };
        attend::attend(self.shape, cache, inputs, (step.cx, buffers), h)
    }
}
