//! One block of the decoder on the device: `x + mixer(norm(x))`, then `x + mlp(norm(x))`.

use super::device::CudaDevice;
use super::gpu::Result;
use super::mixer::Mixer;
use super::ops::{Linear, Mode, RmsNorm, Rows};
use super::pool::{Layer, Step, Workspace};
use super::weights::Kind;
use crate::config::DecoderConfig;
use crate::weights::{LoadError, Weights};

/// A pre-norm block.
#[derive(Debug)]
pub(super) struct Block {
    input_norm: RmsNorm,
    mixer: Mixer,
    mlp_norm: RmsNorm,
    gate_up: Linear, // (2 intermediate, hidden)
    down: Linear,    // (hidden, intermediate)
}

impl Block {
    /// Loads the tensors of `model.layers.N`.
    pub(super) fn new(
        device: &CudaDevice,
        config: &DecoderConfig,
        weights: &Weights<'_>,
        layer: usize,
    ) -> std::result::Result<Self, LoadError> {
        let (hidden, width) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| -> std::result::Result<_, LoadError> {
            Ok(RmsNorm::new(device, &weights.numbers(name, &[hidden])?, config.rms_norm_eps)?)
        };
        let mlp = weights.pp("mlp");
        let (gate, up) = (mlp.matrix("gate_proj.weight", width, hidden)?, mlp.matrix("up_proj.weight", width, hidden)?);
        let down = mlp.matrix("down_proj.weight", hidden, width)?;
        // All three have one type: the product after SwiGLU reads its result in that type.
        let kind = Kind::of(&[&gate, &up, &down]);
        Ok(Self {
            input_norm: norm("input_layernorm.weight")?,
            mixer: Mixer::new(device, config, &weights.pp("self_attn"), layer)?,
            mlp_norm: norm("post_attention_layernorm.weight")?,
            gate_up: Linear::of_kind(device, &[&gate, &up], Mode::Swiglu, kind)?,
            down: Linear::of_kind(device, &[&down], Mode::Add, kind)?,
        })
    }

    /// Returns the bytes of the matrices that one token reads.
    pub(super) fn bytes(&self) -> usize {
        self.mixer.bytes() + self.gate_up.bytes() + self.down.bytes()
    }

    /// Updates the residual stream of the step's tokens in place, and the slots' states.
    pub(super) fn forward(&self, device: &CudaDevice, step: Step, work: &Workspace, layer: Layer) -> Result<()> {
        let tokens = step.rows * step.time;
        let x = work.x.at;
        self.input_norm.forward(device, tokens, x, &work.normed, (self.mixer.kind(), self.mixer.has_gate()))?;
        self.mixer.forward(device, step, work, layer)?;
        self.mlp_norm.forward(device, tokens, x, &work.normed, (self.gate_up.kind, false))?;
        let inner = work.inner.rows(self.gate_up.kind);
        self.gate_up.forward(device, tokens, work.normed.rows(self.gate_up.kind), inner)?;
        self.down.forward(device, tokens, work.inner.rows(self.down.kind), Rows { at: x, stride: work.hidden })
    }
}
