//! The hybrid: softmax attention to the last `sliding_window` tokens and random feature attention with a gate to all
//! older ones, in one normaliser with a learned bias. A token's gate counts when it leaves the window.

pub mod attend;
mod memory;
pub mod naive;

use candle_core::{Result, bail};

use crate::mixers::projections::Projections;
use crate::mixers::rfa::features;
use crate::mixers::{Buffers, LayerMemory, LayerState, Mixer, Rows};
use crate::compute::{Compute, sized};
use crate::config::DecoderConfig;
use crate::feature_map::Features;
use crate::nn::Linear;
use attend as hybrid;
use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

pub use memory::{Hybrid, HybridShape};

/// Projections; the window, feature map, gate and recurrence between them.
#[derive(Debug)]
pub(crate) struct HybridAttention {
    shape: hybrid::Shape,
    window: usize,
    projections: Projections,
    gate: Option<Linear>, // (heads, hidden), with a bias
    features: Features,
    far_bias: Vec<f32>, // (heads)
}

impl HybridAttention {
    /// Reads `gate`, `sigma`, `random_matrices` and `far_bias` of one layer, and what every mixer has.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
        Ok(Self {
            shape: hybrid::Shape { heads, head_dim, features: config.features(), eps: config.denominator_eps },
            window: config.window(),
            projections: Projections::new(config, weights)?,
            gate: features::gate(config, weights)?,
            features: features::of(config, weights)?,
            far_bias: weights.finite("far_bias", &[heads])?,
        })
    }
}

impl Mixer for HybridAttention {
    fn forward(
        &self,
        cx: &mut Compute,
        x: &[f32],
        state: &mut LayerState,
        rows: Rows<'_>,
        buffers: &mut Buffers,
        out: &mut [f32],
        probe: Option<&mut LayerProbe>,
    ) -> Result<()> {
        let hybrid::Shape { heads, head_dim: d, .. } = self.shape;
        let tokens = rows.slots.len() * rows.time;
        let Buffers { qkv, convolved, gate, h, normed, cached, hybrid: held, .. } = buffers;
        let LayerMemory::Hybrid(memory) = &mut state.memory else { bail!("hybrid: the memory is another's") };
        let qkv = self.projections.enter(cx, x, &mut state.conv, rows, (qkv, convolved))?;
        let gate = features::logits(self.gate.as_ref(), cx, x, gate, tokens * heads);
        let h = sized(h, tokens * heads * d);
        let (slots, positions, layer) = (rows.slots, rows.positions, rows.layer);
        let inputs = hybrid::Inputs { qkv, gate, slots, positions, layer };
        let own = hybrid::Layer { shape: self.shape, features: &self.features, far_bias: &self.far_bias };
        hybrid::attend(own, memory, inputs, (cx, cached, held), h)?;
        let far = hybrid::far(&inputs, rows.time, self.window);
        match probe {
            None => state.denominators.note(far * heads, held.clamped().sum()),
            Some(probe) => probe.count((tokens, far), held.clamped(), gate),
        }
        self.projections.leave(cx, h, normed, out);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let gate = self.gate.as_ref().map_or(0, Linear::bytes);
        self.projections.bytes() + gate + self.features.bytes() + size_of_val(&*self.far_bias)
    }
}
