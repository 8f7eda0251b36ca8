//! RWKV-5 and RWKV-6 (Peng et al., 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"), in
//! Hugging Face's layout (`Rwkv5ForCausalLM`, `Rwkv6ForCausalLM`).

use candle_core::{Device, Result, Tensor};
use candle_transformers::models::rwkv_v5::{Config, State, StatePerLayer};
use candle_transformers::models::{rwkv_v5, rwkv_v6};
use serde_json::{Value, json};

use super::family::{Family, LayerState, StateShape};
use super::keys::Keys;
use super::tensors::{Named, Unknown, load};
use crate::config::ConfigError;
use crate::weights::{LoadError, Source};

/// The `model_type`s in `config.json`.
pub(super) const MODEL_TYPES: [&str; 2] = ["rwkv5", "rwkv6"];

/// The default head size.
const HEAD: usize = 64;
/// A head's output is divided by this before its norm.
const DIVISOR: f32 = 8.0;

/// Reads a config. Rejects values that candle's model does not support, and names the key.
pub(super) fn config(keys: &Keys<'_>) -> std::result::Result<Config, ConfigError> {
    let hidden_size = keys.number("hidden_size", 1 << 16)?;
    let head_size = keys.number_or("head_size", HEAD, 1024)?;
    if !hidden_size.is_multiple_of(head_size) {
        return Err(ConfigError::bound("head_size", format!("a divisor of hidden_size ({hidden_size})"), head_size));
    }
    keys.only("attention_hidden_size", &json!(hidden_size))?;
    keys.only("head_size_divisor", &json!(8))?;
    keys.only("tie_word_embeddings", &json!(false))?;
    let intermediate_size = match keys.get("intermediate_size") {
        None | Some(Value::Null) => None,
        Some(_) => Some(keys.number("intermediate_size", 1 << 18)?),
    };
    Ok(Config {
        vocab_size: keys.number("vocab_size", 1 << 22)?,
        hidden_size,
        num_hidden_layers: keys.number("num_hidden_layers", 1024)?,
        attention_hidden_size: hidden_size,
        // In these configs, this key holds the head size.
        num_attention_heads: head_size,
        head_size,
        intermediate_size,
        layer_norm_epsilon: keys.float_or("layer_norm_epsilon", 1e-5, 1e-12..=0.1)?,
        rescale_every: 0,
    })
}

/// The state of a layer: S (heads, d, d), with one row per key element; the last inputs of the time mix and the channel
/// mix.
pub(super) fn state(config: &Config) -> StateShape {
    let Config { num_hidden_layers, hidden_size, head_size, .. } = *config;
    StateShape {
        layers: num_hidden_layers,
        memory: vec![vec![1, hidden_size / head_size, head_size, head_size]],
        inputs: (2, vec![1, hidden_size]),
    }
}

/// Maps candle's tensor names to those of the checkpoint: Hugging Face's RWKV-6 has `time_maa_k` for candle's
/// `time_mix_key`. The models divide a head's output by eight before its norm, which candle leaves out. Scaling the
/// value matrix by 1/8 gives the same bits, because eight is a power of two.
fn named(name: &str) -> Named {
    let mut names = vec![name.to_owned()];
    if let Some((start, part)) = name.split_once("time_mix_") {
        let part = match part {
            "key" => "k",
            "value" => "v",
            "receptance" => "r",
            "gate" => "g",
            part => part,
        };
        names.push(format!("{start}time_maa_{part}"));
    }
    let scale = if name.ends_with("attention.value.weight") { 1.0 / DIVISOR } else { 1.0 };
    Named { names, transposed: false, scale }
}

enum Model {
    V5(rwkv_v5::Model),
    V6(rwkv_v6::Model),
}

/// A model and its config, which determines the shape of its states.
pub(super) struct Rwkv {
    config: Config,
    model: Model,
}

impl Rwkv {
    /// `kind` is one of [`MODEL_TYPES`].
    pub(super) fn load(
        kind: &str,
        config: &Config,
        source: &Source,
        device: &Device,
    ) -> std::result::Result<Self, LoadError> {
        let model = load(source, Unknown::Refused, named, device, |weights| {
            Ok(if kind == MODEL_TYPES[0] {
                Model::V5(rwkv_v5::Model::new(config, weights)?)
            } else {
                Model::V6(rwkv_v6::Model::new(config, weights)?)
            })
        })?;
        Ok(Self { config: config.clone(), model })
    }
}

impl Family for Rwkv {
    fn state(&self) -> StateShape {
        state(&self.config)
    }

    fn step(&self, id: &Tensor, _: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let layer = |layer: &mut LayerState| {
            let [s, time, channel] = &layer[..] else { unreachable!("the shape has three tensors") };
            StatePerLayer {
                linear_attention: s.clone(),
                extract_key_value: time.clone(),
                feed_forward: channel.clone(),
            }
        };
        let mut theirs = State { per_layer: state.iter_mut().map(layer).collect(), pos: 0 };
        let ids = id.unsqueeze(0)?;
        let logits = match &self.model {
            Model::V5(model) => model.forward(&ids, &mut theirs)?,
            Model::V6(model) => model.forward(&ids, &mut theirs)?,
        };
        for (layer, StatePerLayer { linear_attention, extract_key_value, feed_forward }) in
            state.iter_mut().zip(theirs.per_layer)
        {
            *layer = vec![linear_attention, extract_key_value, feed_forward];
        }
        Ok(logits)
    }
}
