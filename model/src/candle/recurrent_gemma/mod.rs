//! RecurrentGemma (Botev et al., 2024, "RecurrentGemma: Moving Past Transformers for Efficient Open Language
//! Models"), in Hugging Face's layout (`RecurrentGemmaForCausalLM`). The architecture is Griffin (De et al., 2024,
//! "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models").
//!
//! Most layers have a gated linear recurrence, the RG-LRU; the others have softmax attention over a window. The blocks
//! are our own, because in `candle-transformers` the state of the model is private and its attention keeps every token.
//!
//! Module dependencies: blocks -> config; this file uses both.

mod blocks;
mod config;

use candle_core::{Device, Result, Tensor};
use candle_nn::{Embedding, Module, embedding};

use super::family::{Family, LayerState, StateShape};
use super::tensors::{Named, Unknown, load};
use crate::weights::{LoadError, Source};
use blocks::{Angles, Layer, Norm};
pub(super) use config::{Config, config};

/// The `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "recurrent_gemma";
/// The token that ends a text, unless the config names another.
pub(super) const EOS: u32 = 1;

/// The state of all layers, in order. Of a recurrence: h (lru) and the last inputs of the convolution, oldest first. Of
/// attention: the keys (window, key heads, head), then the values; the token at position p is in row p mod window.
///
/// Layers differ, so all tensors count as the memory of a single layer.
pub(super) fn state(config: &Config) -> StateShape {
    let mut memory = Vec::new();
    for &attention in &config.attention {
        if attention {
            memory.extend(vec![vec![config.window, config.key_heads, config.head()]; 2]);
        } else {
            memory.extend(vec![vec![1, config.lru]; 1 + config.taps]);
        }
    }
    StateShape { layers: 1, memory, inputs: (0, Vec::new()) }
}

/// A model and its config, which determines the shape of its state.
pub(super) struct RecurrentGemma {
    config: Config,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
}

impl RecurrentGemma {
    pub(super) fn load(config: &Config, source: &Source, device: &Device) -> std::result::Result<Self, LoadError> {
        load(source, Unknown::Refused, Named::plain, device, |weights| {
            let weights = weights.pp("model");
            let layer = |(i, &attention)| Layer::new(config, attention, &weights.pp("layers").pp(i));
            Ok(Self {
                config: config.clone(),
                embedding: embedding(config.vocab_size, config.hidden, weights.pp("embed_tokens"))?,
                layers: config.attention.iter().enumerate().map(layer).collect::<Result<_>>()?,
                norm: Norm::new(config, &weights.pp("final_norm"))?,
            })
        })
    }

    /// The angles of rotary position embeddings, computed in f64 because positions have no limit.
    fn angles(&self, position: u64, device: &Device) -> Result<Angles> {
        let pairs = self.config.head() / 4;
        let angle = |i| position as f64 * self.config.theta.powf(-(i as f64) / pairs as f64);
        let (sin, cos): (Vec<_>, Vec<_>) = (0..pairs).map(|i| angle(i).sin_cos()).unzip();
        let tensor = |numbers: Vec<f64>| {
            Tensor::from_iter(numbers.into_iter().map(|number| number as f32), device)?.reshape((1, pairs))
        };
        Ok([tensor(cos)?, tensor(sin)?])
    }

    /// Feeds one token through the layers -> (1, hidden)
    fn layers(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let [state] = state else { unreachable!("the shape has one layer") };
        // Models are trained with this factor in bf16.
        let scale = half::bf16::from_f64((self.config.hidden as f64).sqrt()).to_f64();
        let mut x = (self.embedding.forward(id)? * scale)?;
        let angles = self.angles(position, x.device())?;
        let mut state = &mut state[..];
        for layer in &self.layers {
            let (own, rest) = state.split_at_mut(layer.tensors());
            x = layer.step(&x, position, &angles, own)?;
            state = rest;
        }
        Ok(x)
    }
}

impl Family for RecurrentGemma {
    fn state(&self) -> StateShape {
        state(&self.config)
    }

    fn step(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let x = self.layers(id, position, state)?;
        let logits = self.norm.forward(&x)?.matmul(&self.embedding.embeddings().t()?)?;
        let cap = self.config.soft_cap;
        (logits / cap)?.tanh()? * cap
    }

    /// Without the head, which is a quarter of the work of the published model with 2 billion parameters.
    fn read(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<()> {
        self.layers(id, position, state).map(drop)
    }
}
