//! The interface of a mixer: the part of an [`super::attention_layer::AttentionLayer`] between its projections.

use std::fmt::Debug;

use super::cross::SourceReader;
use super::layer::{Kept, SlotState, Step};
use crate::compute::Compute;
use crate::config::{ConfigError, DecoderConfig, GivenKeys};
use crate::error::{self, ModelError};
use crate::memory::StateType;
use crate::weights::{LoadError, TensorList, Weights};

/// The inputs of a mixer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projected<'a> {
    /// The normed input of the layer: (rows, time, hidden)
    pub(crate) x: &'a [f32],
    /// q, k and v of each token, convolved and rotated as the config asks: (rows, time, 3 heads d)
    pub(crate) qkv: &'a [f32],
}

/// Mixes tokens in each head, with a constant-size state.
pub(crate) trait Mixer: Debug + Send + Sync + Sized + 'static {
    /// The memory of the heads, for the slots of a pool.
    type State: SlotState + 'static;
    /// Intermediate results, reused from step to step.
    type Buffers: Debug + Default + Send + Sync + 'static;
    /// How cross attention in layers of this mixer reads a source.
    type Source: SourceReader;

    /// Whether [`Self::mix`] supports draft tokens and [`Self::keep`].
    const SPECULATES: bool = false;

    /// The name in reports.
    fn name(config: &DecoderConfig) -> &'static str;

    /// Sets the defaults that depend on the mixer.
    fn complete(config: &mut DecoderConfig, given: &GivenKeys) -> Result<(), ConfigError>;

    /// Checks the bounds that depend on the mixer.
    fn validate(config: &DecoderConfig) -> Result<(), ConfigError>;

    /// Number of features per head (F); 0 without a feature map.
    fn features(config: &DecoderConfig) -> usize;

    /// Elements of one head's memory.
    fn head_numbers(config: &DecoderConfig) -> usize;

    /// Elements of these that a head caches per token of the `sliding_window`; 0 without a cache.
    fn cached_numbers(_config: &DecoderConfig) -> usize {
        0
    }

    /// The tensors that [`Self::load`] reads, below `self_attn`.
    fn tensors(config: &DecoderConfig, list: &mut TensorList);

    /// Loads the tensors of one layer.
    fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError>;

    /// Bytes of the matrices that a token reads.
    fn bytes(&self) -> usize;

    /// The upper bound of each head's key maximum: (heads), or empty if the state has no maxima.
    fn greatest_maxima(&self) -> &[f32] {
        &[]
    }

    /// The state of `slots` empty texts.
    fn new_state(&self, slots: usize, state: StateType) -> Self::State;

    /// Runs the rows of a step through the mixer. h: (rows, time, heads d)
    fn mix(
        &self,
        step: &mut Step<'_>,
        projected: Projected<'_>,
        state: &mut Self::State,
        buffers: &mut Self::Buffers,
        h: &mut [f32],
    ) -> error::Result<()>;

    /// Advances a slot by the first tokens of its row in the last draft step, with the same result as a step of these
    /// tokens.
    fn keep(&self, _cx: &mut Compute, _state: &mut Self::State, _kept: Kept) -> error::Result<()> {
        Err(ModelError::NoSpeculation)
    }
}
