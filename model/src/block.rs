//! One block of the decoder: `x + mixer(norm(x))`, of an encoder-decoder `x + cross(norm(x))`, then `x + mlp(norm(x))`.

use candle_core::{Result, bail};

use crate::mixers::cross::{self, CrossAttention};
use crate::mixers::{self, Mixer, Rows};
use crate::compute::{Compute, sized};
use crate::config::{DecoderConfig, SourceConfig};
use crate::kernels::norm;
use crate::mixers::LayerState;
use crate::nn::{Mlp, MlpBuffers, RmsNorm};
use crate::probe::LayerProbe;
use crate::weights::{LoadError, Weights};

/// A pre-norm block.
#[derive(Debug)]
pub(crate) struct Block {
    input_norm: RmsNorm, // (hidden)
    mixer: Box<dyn Mixer>,
    cross: Option<(RmsNorm, CrossAttention)>,
    mlp_norm: RmsNorm, // (hidden)
    mlp: Mlp,
}

/// What the blocks hold on the way, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    normed: Vec<f32>, // (rows, hidden)
    delta: Vec<f32>,  // (rows, hidden)
    mixer: attention::Buffers,
    cross: cross::Buffers,
    mlp: MlpBuffers,
}

impl Block {
    /// Reads the tensors of `model.layers.N`.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| RmsNorm::load(weights, name, hidden, config.rms_norm_eps);
        let cross = |_: SourceConfig| -> std::result::Result<_, LoadError> {
            Ok((norm("cross_attn_layernorm")?, CrossAttention::new(config, &weights.pp("cross_attn"))?))
        };
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer: attention::build(config, &weights.pp("self_attn"))?,
            cross: config.source().map(cross).transpose()?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&weights.pp("mlp"), hidden, inner)?,
        })
    }

    /// Bytes of the matrices that a token reads.
    pub(crate) fn bytes(&self) -> usize {
        self.mixer.bytes() + self.mlp.bytes() + self.cross.as_ref().map_or(0, |(_, cross)| cross.bytes())
    }

    /// Puts what cross attention keeps of a source into a slot. source: (tokens, hidden)
    pub(crate) fn keep(&self, cx: &mut Compute, source: &[f32], state: &mut LayerState, slot: usize) -> Result<()> {
        match (&self.cross, &mut state.cross) {
            (Some((_, cross)), Some(memory)) => cross.keep(cx, source, memory, slot),
            _ => bail!("cross attention: the block or its memory has none"),
        }
    }

    /// What no maximum of a head's keys is above: (heads), or empty where heads remember none.
    pub(crate) fn greatest(&self) -> &[f32] {
        self.mixer.greatest()
    }

    /// x: (rows time, hidden), changed in place; the rows' slots of `state` are taken forward.
    pub(crate) fn forward(
        &self,
        cx: &mut Compute,
        x: &mut [f32],
        state: &mut LayerState,
        rows: Rows<'_>,
        buffers: &mut Buffers,
        probe: Option<&mut LayerProbe>,
    ) -> Result<()> {
        let Buffers { normed, delta, mixer, cross, mlp } = buffers;
        let (normed, delta) = (sized(normed, x.len()), sized(delta, x.len()));
        self.input_norm.forward(cx, x, normed);
        let probed = probe.is_some();
        self.mixer.forward(cx, normed, state, rows, mixer, delta, probe)?;
        norm::add(cx.isa, x, delta);
        match (&self.cross, &state.cross) {
            (None, None) => {}
            (Some((norm, attention)), Some(memory)) => {
                norm.forward(cx, x, normed);
                let read = attention.forward(cx, normed, memory, rows.slots, cross, delta)?;
                if !probed {
                    state.denominators.note(read.all as usize, read.clamped);
                }
                norm::add(cx.isa, x, delta);
            }
            _ => bail!("cross attention: the block and its memory do not fit"),
        }
        self.mlp_norm.forward(cx, x, normed);
        self.mlp.forward(cx, normed, mlp, delta);
        norm::add(cx.isa, x, delta);
        Ok(())
    }
}
