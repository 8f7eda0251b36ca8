//! RFA-Gate on candle, implemented by [`portable::Decoder`].

use candle_core::{Device, Result, Tensor};

use super::family::{Family, LayerState, StateShape};
use super::tensors::{Named, Unknown, load};
use crate::config::{ConfigError, DecoderConfig};
use crate::portable::{self, Decoder, State};
use crate::weights::{LoadError, Source};

/// Rejects what the portable decoder does not support, and names the key.
pub(super) fn config(ours: &DecoderConfig) -> std::result::Result<DecoderConfig, ConfigError> {
    portable::check(ours)?;
    Ok(ours.clone())
}

/// The state of a layer: S, z and c of all heads, and the last inputs of the convolution.
pub(super) fn state(config: &DecoderConfig) -> StateShape {
    let (n, d, features) = (config.num_attention_heads, config.head_dim, config.features());
    StateShape {
        layers: config.num_hidden_layers,
        memory: vec![vec![1, n, features, d], vec![1, n, features, 1], vec![1, n, 1, 1]],
        inputs: (config.conv_kernel.saturating_sub(1), vec![1, 1, 3 * n * d]),
    }
}

impl Decoder {
    pub(super) fn open(
        config: &DecoderConfig,
        source: &Source,
        device: &Device,
    ) -> std::result::Result<Self, LoadError> {
        load(source, Unknown::Ignored, Named::plain, device, |weights| Self::new(config.clone(), &weights))
    }
}

impl Family for Decoder {
    fn state(&self) -> StateShape {
        state(self.config())
    }

    fn step(&self, id: &Tensor, position: u64, state: &mut [LayerState]) -> Result<Tensor> {
        let layer = |layer: &mut LayerState| {
            let [s, z, c, inputs @ ..] = &layer[..] else { unreachable!("the shape has at least three tensors") };
            let conv = (!inputs.is_empty()).then(|| Tensor::cat(inputs, 1)).transpose()?;
            Ok(portable::LayerState { s: s.clone(), z: z.clone(), c: c.clone(), conv })
        };
        let mut own = State { position, layers: state.iter_mut().map(layer).collect::<Result<_>>()? };
        let logits = self.step(id, &mut own)?;
        for (layer, portable::LayerState { s, z, c, conv }) in state.iter_mut().zip(own.layers) {
            let inputs = match conv {
                Some(inputs) => inputs.chunk(inputs.dim(1)?, 1)?,
                None => Vec::new(),
            };
            *layer = [s, z, c].into_iter().chain(inputs).collect();
        }
        Ok(logits)
    }
}
