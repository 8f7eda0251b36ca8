//! The mixers: what moves information between tokens. One interface, chosen by the config.

pub(crate) mod cross;
mod features;
mod hybrid;
mod projections;
mod rfa;
pub(crate) mod rotary;
mod softmax;

use candle_core::Result;

use crate::compute::Compute;
use crate::config::{Attention, DecoderConfig};
use crate::memory::LayerState;
use crate::ops::{hybrid as mixed, recurrent, softmax as cached};
use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

pub(crate) use hybrid::HybridAttention;
pub(crate) use rfa::RfaAttention;
pub(crate) use softmax::SoftmaxAttention;

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
