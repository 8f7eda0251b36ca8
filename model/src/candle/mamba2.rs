//! Mamba-2 on candle: a second implementation alongside `mixers::mamba2`, for fewer shapes.

use candle_core::{Device, IndexOp, Result, Tensor};
use candle_transformers::models::mamba2::{Config, Model, State};

use super::family::{Family, LayerState, StateShape};
use super::keys::fixed;
use super::tensors::{Named, Unknown, load};
use crate::config::{ConfigError, DecoderConfig, StateSpace};
use crate::weights::{LoadError, Source};

/// Number of past inputs that the convolution reads.
const TAPS: usize = 3;

/// Converts the config to candle's. Rejects values that candle's model does not support, and names the key.
pub(super) fn config(ours: &DecoderConfig) -> std::result::Result<Config, ConfigError> {
    let Some(StateSpace { state_size, n_groups, norm_groups, time_step_limit, use_bias, use_conv_bias }) =
        ours.state_space
    else {
        return Err(ConfigError::bound("state_space", "given", "none"));
    };
    fixed("conv_kernel", ours.conv_kernel, TAPS + 1)?;
    fixed("layer_norm_epsilon", ours.rms_norm_eps, 1e-5)?;
    fixed("tie_word_embeddings", ours.tie_word_embeddings, true)?;
    fixed("norm_groups", norm_groups, 1)?;
    fixed("use_bias", use_bias, false)?;
    fixed("use_conv_bias", use_conv_bias, true)?;
    if time_step_limit.0 != 0.0 || time_step_limit.1.is_some_and(f64::is_finite) {
        let found = format!("[{}, {:?}]", time_step_limit.0, time_step_limit.1);
        return Err(ConfigError::bound("time_step_limit", "[0, Infinity] for the candle backend", found));
    }
    if !ours.inner_size().is_multiple_of(ours.hidden_size) {
        let bound = "a multiple of hidden_size for the candle backend";
        return Err(ConfigError::bound("intermediate_size", bound, ours.inner_size()));
    }
    Ok(Config {
        d_model: ours.hidden_size,
        n_layer: ours.num_hidden_layers,
        vocab_size: ours.vocab_size,
        d_state: state_size,
        expand: ours.inner_size() / ours.hidden_size,
        headdim: ours.head_dim,
        ngroups: n_groups,
        pad_vocab_size_multiple: 1,
    })
}

/// The state of a layer: S (heads, d, N) and the last inputs of the convolution.
pub(super) fn state(config: &Config) -> StateShape {
    let Config { d_model, expand, headdim, d_state, ngroups, .. } = *config;
    let inner = d_model * expand;
    StateShape {
        layers: config.n_layer,
        memory: vec![vec![1, inner / headdim, headdim, d_state]],
        inputs: (TAPS, vec![1, inner + 2 * ngroups * d_state, 1]),
    }
}

/// A model and its config, which determines the shape of its states.
pub(super) struct Mamba2 {
    config: Config,
    model: Model,
}

impl Mamba2 {
    pub(super) fn load(config: &Config, source: &Source, device: &Device) -> std::result::Result<Self, LoadError> {
        let model =
            load(source, Unknown::Ignored, Named::plain, device, |weights| Model::new(config, weights.pp("backbone")))?;
        Ok(Self { config: config.clone(), model })
    }
}

impl Family for Mamba2 {
    fn state(&self) -> StateShape {
        state(&self.config)
    }

    /// Candle keeps one more input than a step reads. It comes first, and its value does not matter.
    fn step(&self, id: &Tensor, _: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let mut theirs = State { hs: Vec::new(), conv_states: Vec::new(), pos: 0 };
        for layer in &*state {
            theirs.hs.push(layer[0].clone());
            theirs.conv_states.push(Tensor::cat(&[&layer[1], &layer[1], &layer[2], &layer[3]], 2)?);
        }
        let logits = self.model.forward(id, &mut theirs)?;
        for ((layer, h), inputs) in state.iter_mut().zip(theirs.hs).zip(theirs.conv_states) {
            let last = (1..=TAPS).map(|tap| inputs.i((.., .., tap..=tap)));
            *layer = std::iter::once(Ok(h)).chain(last).collect::<Result<_>>()?;
        }
        Ok(logits)
    }
}
