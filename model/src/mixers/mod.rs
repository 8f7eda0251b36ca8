//! The mixers: what moves information between tokens. One interface, chosen by the config.

mod conv;
pub(crate) mod cross;
pub mod hybrid;
mod projections;
pub mod rfa;
pub(crate) mod rotary;
pub mod softmax;

use candle_core::Result;

use crate::compute::Compute;
use crate::config::{Attention, DecoderConfig};
use crate::memory::{Denominators, StateType};
use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

use hybrid::{Hybrid, HybridAttention, HybridShape, attend as mixed};
use rfa::{HeadSums, Memory, RfaAttention, recurrent};
use softmax::{Cache, SoftmaxAttention, attend as cached};

/// Which slots a batch's rows belong to, and how many tokens each has seen before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    /// One slot for each row, all different.
    pub(crate) slots: &'a [usize],
    /// The position of each row's first new token.
    pub(crate) positions: &'a [u64],
    /// New tokens of each row.
    pub(crate) time: usize,
    /// The angles of those tokens, where the config has rotary positions.
    pub(crate) angles: Option<&'a rotary::Angles>,
    /// The layer's number.
    pub(crate) layer: usize,
}

/// What a mixer holds on the way.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    qkv: Vec<f32>, // (rows, time, 3 heads d)
    convolved: Vec<f32>,
    gate: Vec<f32>, // (rows, time, heads)
    h: Vec<f32>,    // (rows, time, heads d)
    normed: Vec<f32>,
    scan: recurrent::Buffers,
    cached: cached::Buffers,
    hybrid: mixed::Buffers,
}

/// A layer that mixes tokens along time, with a state of constant size.
pub(crate) trait Mixer: std::fmt::Debug + Send + Sync {
    /// x: (rows, time, hidden) -> out: the same shape; the rows' slots of `state` are taken forward.
    #[allow(clippy::too_many_arguments, reason = "what a step has: weights are in self, all else is lent")]
    fn forward(
        &self,
        cx: &mut Compute,
        x: &[f32],
        state: &mut LayerState,
        rows: Rows<'_>,
        buffers: &mut Buffers,
        out: &mut [f32],
        probe: Option<&mut LayerProbe>,
    ) -> Result<()>;

    /// Bytes of the matrices.
    fn bytes(&self) -> usize;

    /// What no maximum of a head's keys is above: (heads), or empty where heads remember none.
    fn greatest(&self) -> &[f32] {
        &[]
    }
}

/// The mixer that the config asks for.
pub(crate) fn build(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Box<dyn Mixer>, LoadError> {
    match config.attention {
        Attention::Rfa => Ok(Box::new(RfaAttention::new(config, weights)?)),
        Attention::Softmax => Ok(Box::new(SoftmaxAttention::new(config, weights)?)),
        Attention::Hybrid => Ok(Box::new(HybridAttention::new(config, weights)?)),
    }
}

/// What one layer remembers, whatever its attention is.
#[derive(Debug)]
pub(crate) enum LayerMemory {
    /// Random feature attention.
    Sums(Memory),
    /// Softmax attention.
    Cache(Cache),
    /// Softmax attention to the last tokens, random feature attention to all older ones.
    Hybrid(Hybrid),
}

impl LayerMemory {
    /// The empty memories of one layer.
    pub(crate) fn zeros(config: &DecoderConfig, slots: usize, state: StateType) -> Self {
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        match config.attention {
            Attention::Rfa => Self::Sums(Memory::zeros(slots, HeadSums::of(config), state)),
            Attention::Softmax => Self::Cache(Cache::zeros(slots, heads, config.window(), d, state)),
            Attention::Hybrid => {
                let shape = HybridShape { sums: HeadSums::of(config), window: config.window(), gate: config.gate };
                Self::Hybrid(Hybrid::zeros(slots, shape, state))
            }
        }
    }

    /// The empty memories of one layer's cross attention, whose sums have no maximum; none where there is no source.
    pub(crate) fn of_source(config: &DecoderConfig, slots: usize, state: StateType) -> Option<Self> {
        let (heads, d) = (config.num_attention_heads, config.head_dim);
        config.source().map(|source| match config.attention {
            Attention::Softmax => Self::Cache(Cache::zeros(slots, heads, source.max_positions, d, state)),
            Attention::Rfa | Attention::Hybrid => Self::Sums(Memory::zeros(slots, HeadSums::of(config), state)),
        })
    }

    /// Bytes of one slot.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Sums(memory) => memory.bytes(),
            Self::Cache(cache) => cache.bytes(),
            Self::Hybrid(memory) => memory.bytes(),
        }
    }

    /// Makes a slot empty.
    pub(crate) fn reset(&mut self, slot: usize) {
        match self {
            Self::Sums(memory) => memory.reset(slot),
            Self::Cache(cache) => cache.reset(slot),
            Self::Hybrid(memory) => memory.reset(slot),
        }
    }

    /// Adds a slot's numbers to `out`, head by head.
    pub(crate) fn read(&self, slot: usize, out: &mut Vec<f32>) {
        match self {
            Self::Sums(memory) => memory.read(slot, out),
            Self::Cache(cache) => cache.read(slot, out),
            Self::Hybrid(memory) => memory.read(slot, out),
        }
    }

    /// Puts back the numbers of a slot whose text has so many tokens.
    pub(crate) fn write(&mut self, slot: usize, numbers: &[f32], tokens: u64) {
        match self {
            Self::Sums(memory) => memory.write(slot, numbers),
            Self::Cache(cache) => cache.write(slot, numbers, tokens),
            Self::Hybrid(memory) => memory.write(slot, numbers, tokens),
        }
    }
}

/// One layer's part of the pool.
#[derive(Debug)]
pub(crate) struct LayerState {
    /// What every head remembers.
    pub(crate) memory: LayerMemory,
    /// The last inputs of the convolutions of q, k and v, oldest first: (slots, conv_kernel - 1, 3 heads d); empty
    /// without convolutions
    pub(crate) conv: Vec<f32>,
    /// What cross attention keeps of the source, where there is one.
    pub(crate) cross: Option<LayerMemory>,
    pub(crate) denominators: Denominators,
}

