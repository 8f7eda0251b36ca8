//! RWKV-7 on candle: a second implementation alongside `mixers::rwkv7`, for heads of size 64.

use candle_core::{Device, Result, Tensor};
use candle_transformers::models::rwkv_v7::{Config, Model, ModelVersion, State, StatePerLayer};

use super::family::{Family, LayerState, StateShape};
use super::keys::fixed;
use super::tensors::{Named, Unknown, load};
use crate::config::{ConfigError, DecoderConfig};
use crate::schema::native::NAMES;
use crate::weights::{LoadError, Source};

/// Converts the config to candle's. Rejects values that candle's model does not support, and names the key.
pub(super) fn config(ours: &DecoderConfig) -> std::result::Result<Config, ConfigError> {
    // The norm of a head has an epsilon of 64e-5.
    fixed("head_dim", ours.head_dim, 64)?;
    fixed("norm_eps", ours.rms_norm_eps, 1e-5)?;
    if ours.num_hidden_layers < 2 {
        return Err(ConfigError::bound("num_hidden_layers", "at least 2 for the candle backend", 1));
    }
    Ok(Config {
        version: ModelVersion::V7,
        vocab_size: ours.vocab_size,
        hidden_size: ours.hidden_size,
        num_hidden_layers: ours.num_hidden_layers,
        head_size: ours.head_dim,
        intermediate_size: Some(ours.intermediate_size),
        rescale_every: 0,
    })
}

/// The state of a layer: S (heads, d, d), with one row per value element; the last inputs of the time mix and the
/// channel mix.
pub(super) fn state(config: &Config) -> StateShape {
    let Config { num_hidden_layers, hidden_size, head_size, .. } = *config;
    StateShape {
        layers: num_hidden_layers,
        memory: vec![vec![hidden_size / head_size, head_size, head_size]],
        inputs: (2, vec![hidden_size]),
    }
}

/// Maps candle's tensor names, which are those of the author's `.pth` files, to ours.
fn named(name: &str) -> Named {
    match name {
        "head.weight" => {
            let names = vec!["lm_head.weight".into(), "model.embeddings.weight".into()];
            Named { names, ..Named::plain("") }
        }
        // The first layer has no earlier values to mix in. Candle takes the rank for all layers from these tensors and
        // ignores their contents, so it gets those of layer 1.
        "blocks.0.att.v0" | "blocks.0.att.v1" | "blocks.0.att.v2" => named(&name.replace(".0.", ".1.")),
        name => {
            let ours = NAMES.ours(name).unwrap_or_else(|| name.into());
            Named { transposed: NAMES.is_transposed(&ours), ..Named::plain(&ours) }
        }
    }
}

/// A model and its config, which determines the shape of its states.
pub(super) struct Rwkv7 {
    config: Config,
    model: Model,
}

impl Rwkv7 {
    pub(super) fn load(config: &Config, source: &Source, device: &Device) -> std::result::Result<Self, LoadError> {
        let model = load(source, Unknown::Ignored, named, device, |weights| Model::new(config, weights))?;
        Ok(Self { config: config.clone(), model })
    }
}

impl Family for Rwkv7 {
    fn state(&self) -> StateShape {
        state(&self.config)
    }

    fn step(&self, id: &Tensor, _: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let layer = |layer: &mut LayerState| {
            let [s, time, channel] = &layer[..] else { unreachable!("the shape has three tensors") };
            StatePerLayer { att_kv: s.clone(), att_x_prev: time.clone(), ffn_x_prev: channel.clone() }
        };
        let mut theirs = State { per_layer: state.iter_mut().map(layer).collect(), dea: None, pos: 0 };
        let logits = self.model.forward(&id.unsqueeze(0)?, &mut theirs, &[])?;
        for (layer, StatePerLayer { att_kv, att_x_prev, ffn_x_prev }) in state.iter_mut().zip(theirs.per_layer) {
            *layer = vec![att_kv, att_x_prev, ffn_x_prev];
        }
        Ok(logits)
    }
}
