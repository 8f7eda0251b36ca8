//! Softmax attention to the last `sliding_window` tokens, keys and values cached: what random feature attention is
//! measured against, and what a checkpoint of the usual kind has.

pub mod attend;
pub(crate) mod cache;

use candle_core::{Result, bail};

use crate::mixers::projections::Projections;
use crate::mixers::{Buffers, LayerMemory, LayerState, Mixer, Rows};
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use attend as softmax;
use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

pub use cache::Cache;

/// Projections and the cache between them.
#[derive(Debug)]
pub(crate) struct SoftmaxAttention {
    shape: softmax::Shape,
    projections: Projections,
}

impl SoftmaxAttention {
    /// Reads the tensors of one layer: those that every mixer has.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let shape = softmax::Shape { heads: config.num_attention_heads, head_dim: config.head_dim };
        Ok(Self { shape, projections: Projections::new(config, weights)? })
    }
}

impl Mixer for SoftmaxAttention {
    fn forward(
        &self,
        cx: &mut Compute,
        x: &[f32],
        state: &mut LayerState,
        rows: Rows<'_>,
        buffers: &mut Buffers,
        out: &mut [f32],
        _: Option<&mut LayerProbe>,
    ) -> Result<()> {
        let Buffers { qkv, convolved, h, normed, cached, .. } = buffers;
        let LayerMemory::Cache(cache) = &mut state.memory else { bail!("softmax: the memory is no cache") };
        let qkv = self.projections.enter(cx, x, &mut state.conv, rows, (qkv, convolved))?;
        let h = sized(h, qkv.len() / 3);
        let inputs = softmax::Inputs { qkv, slots: rows.slots, positions: rows.positions };
        softmax::attend(self.shape, cache, inputs, (cx, cached), h)?;
        self.projections.leave(cx, h, normed, out);
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.projections.bytes()
    }
}
