//! Mamba (Gu and Dao, 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"), from Hugging Face's
//! `MambaForCausalLM` or the `mamba_ssm` package.

use candle_core::{Device, Result, Tensor};
use candle_transformers::models::mamba::{Config, Model, State};
use serde_json::{Map, Value, json};

use super::family::{Family, LayerState, StateShape};
use super::keys::Keys;
use super::tensors::{Named, Unknown, load};
use crate::config::ConfigError;
use crate::weights::{LoadError, Source};

/// The `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "mamba";
/// Number of past inputs that the convolution reads.
const TAPS: usize = 3;
/// State elements per channel.
const STATE: usize = 16;

/// Returns whether a config without a `model_type` is a first-generation Mamba config of the `mamba_ssm` package.
pub(super) fn is_of_the_package(keys: &Map<String, Value>) -> bool {
    let layer = keys.get("ssm_cfg").and_then(|cfg| cfg.get("layer")).and_then(Value::as_str);
    !keys.contains_key("model_type") && keys.contains_key("d_model") && layer.is_none_or(|layer| layer == "Mamba1")
}

/// Reads a config. Rejects values that candle's model does not support, and names the key.
pub(super) fn config(keys: &Keys<'_>) -> std::result::Result<Config, ConfigError> {
    let package = keys.get("model_type").is_none();
    let (hidden, layers) = if package { ("d_model", "n_layer") } else { ("hidden_size", "num_hidden_layers") };
    let d_model = keys.number(hidden, 1 << 16)?;
    for (key, only) in [
        ("state_size", json!(STATE)),
        ("conv_kernel", json!(TAPS + 1)),
        ("expand", json!(2)),
        ("intermediate_size", json!(2 * d_model)),
        ("time_step_rank", json!(d_model.div_ceil(16))),
        ("layer_norm_epsilon", json!(1e-5)),
        ("hidden_act", json!("silu")),
        ("use_bias", json!(false)),
        ("use_conv_bias", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("tie_embeddings", json!(true)),
        ("rms_norm", json!(true)),
        ("attn_layer_idx", json!([])),
        ("d_intermediate", json!(0)),
    ] {
        // The config may leave the rank to the model (`auto`).
        if keys.get(key).is_none_or(|found| key != "time_step_rank" || found != "auto") {
            keys.only(key, &only)?;
        }
    }
    if let Some(Value::Object(layer)) = keys.get("ssm_cfg")
        && let Some((name, found)) = layer.iter().find(|(name, _)| *name != "layer")
    {
        return Err(ConfigError::bound("ssm_cfg", format!("without {name:?}"), found));
    }
    // The package pads the embedding with rows beyond the vocabulary, for efficiency on GPUs.
    let multiple = if package { keys.number_or("pad_vocab_size_multiple", 8, 1 << 16)? } else { 1 };
    Ok(Config {
        d_model,
        n_layer: keys.number(layers, 1024)?,
        vocab_size: keys.number("vocab_size", 1 << 22)?,
        pad_vocab_size_multiple: multiple,
    })
}

/// Number of rows of the embedding, including padding.
pub(super) fn vocab_size(config: &Config) -> usize {
    config.vocab_size.next_multiple_of(config.pad_vocab_size_multiple)
}

/// The state of a layer: h (inner, N) and the last inputs of the convolution.
pub(super) fn state(config: &Config) -> StateShape {
    let inner = 2 * config.d_model;
    StateShape { layers: config.n_layer, memory: vec![vec![1, inner, STATE]], inputs: (TAPS, vec![1, inner]) }
}

/// Hugging Face names the embedding `embeddings`, the package `embedding`.
fn named(name: &str) -> Named {
    let mut names = vec![name.into(), name.replace("embedding.", "embeddings.")];
    names.dedup();
    Named { names, ..Named::plain("") }
}

/// A model and its config, which determines the shape of its states.
pub(super) struct Mamba {
    config: Config,
    model: Model,
}

impl Mamba {
    pub(super) fn load(config: &Config, source: &Source, device: &Device) -> std::result::Result<Self, LoadError> {
        let model =
            load(source, Unknown::Refused, named, device, |weights| Model::new(config, weights.pp("backbone")))?;
        Ok(Self { config: config.clone(), model })
    }
}

impl Family for Mamba {
    fn state(&self) -> StateShape {
        state(&self.config)
    }

    /// Candle keeps the inputs in a ring buffer and writes the new one at index `pos`, which is always 0 here.
    fn step(&self, id: &Tensor, _: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let mut theirs = State { hs: Vec::new(), prev_xs: Vec::new(), pos: 0 };
        for layer in &*state {
            let [h, first, second, third] = &layer[..] else { unreachable!("the shape has four tensors") };
            theirs.hs.push(h.clone());
            theirs.prev_xs.push([first, first, second, third].map(Tensor::clone));
        }
        let logits = self.model.forward(id, &mut theirs)?;
        for ((layer, h), [new, _, second, third]) in state.iter_mut().zip(theirs.hs).zip(theirs.prev_xs) {
            *layer = vec![h, second, third, new];
        }
        Ok(logits)
    }
}
