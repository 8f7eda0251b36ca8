//! One block of the decoder: `x + mixer(norm(x))`, then `x + mlp(norm(x))`.

use candle_core::{Result, Tensor};

use crate::attention::{self, Mixer, Rows};
use crate::config::DecoderConfig;
use crate::nn::{Mlp, RmsNorm};
use crate::probe::LayerProbe;
use crate::state::LayerState;
use crate::weights::{LoadError, Weights};

/// A pre-norm block.
#[derive(Debug)]
pub(crate) struct Block {
    input_norm: RmsNorm, // (hidden)
    mixer: Box<dyn Mixer>,
    mlp_norm: RmsNorm, // (hidden)
    mlp: Mlp,
}

impl Block {
    /// Reads the tensors of `model.layers.N`.
    pub(crate) fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let norm = |name: &str| -> std::result::Result<RmsNorm, LoadError> {
            Ok(RmsNorm::new(&weights.get(&format!("{name}.weight"), &[hidden])?, config.rms_norm_eps)?)
        };
        let mlp = weights.pp("mlp");
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            mixer: attention::build(config, &weights.pp("self_attn"))?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::new(
                &mlp.get("gate_proj.weight", &[inner, hidden])?,
                &mlp.get("up_proj.weight", &[inner, hidden])?,
                &mlp.get("down_proj.weight", &[hidden, inner])?,
            )?,
        })
    }

    /// x: (batch, time, hidden) f32 -> the same shape; the rows' slots of `state` are taken forward.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        state: &LayerState,
        rows: Rows<'_>,
        probe: Option<&mut LayerProbe>,
    ) -> Result<Tensor> {
        let x = (x + self.mixer.forward(&self.input_norm.forward(x)?, state, rows, probe)?)?;
        let shape = x.shape();
        let inner = self.mlp.forward(&self.mlp_norm.forward(&x)?.flatten_to(1)?)?;
        &x + inner.reshape(shape)?
    }
}
