//! What random feature attention and the hybrid read of a layer besides the projections: the gate and the feature map.

use candle_core::{Device, Tensor};

use crate::compute::{Compute, sized};
use crate::config::{DecoderConfig, FeatureMap};
use crate::feature_map::{ArcCosineFeatures, EluFeatures, FavorFeatures, Features, GaussianFeatures};
use crate::nn::Linear;
use crate::weights::{LoadError, Weights};

/// The gate of one layer's heads, where there is one: (heads, hidden), with a bias.
pub(crate) fn gate(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Option<Linear>, LoadError> {
    if !config.gate {
        return Ok(None);
    }
    let heads = config.num_attention_heads;
    let bias = weights.numbers("gate.bias", &[heads])?;
    Ok(Some(Linear::new(&weights.matrix("gate.weight", heads, config.hidden_size)?, Some(bias))?))
}

/// The gates' logits (tokens, heads) of x (tokens, hidden), where there is a gate.
pub(crate) fn logits<'a>(
    layer: Option<&Linear>,
    cx: &mut Compute,
    x: &[f32],
    room: &'a mut Vec<f32>,
    len: usize,
) -> Option<&'a [f32]> {
    layer.map(|layer| {
        let logits = sized(room, len);
        layer.forward(cx, x, logits);
        &*logits
    })
}

/// The feature map of one layer's heads.
pub(crate) fn of(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Features, LoadError> {
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    let shape = [heads, config.proj_dim, d];
    let tensor = |numbers: Vec<f32>, shape: &[usize]| Tensor::from_vec(numbers, shape, &Device::Cpu);
    let random = || -> Result<_, LoadError> {
        let matrices = tensor(weights.numbers("random_matrices", &shape)?, &shape)?;
        Ok((matrices, tensor(weights.numbers("sigma", &[heads, d])?, &[heads, d])?))
    };
    Ok(match config.feature_map {
        FeatureMap::Gaussian => {
            let (matrices, sigma) = random()?;
            Features::Gaussian(GaussianFeatures::new(&matrices, &sigma)?)
        }
        FeatureMap::ArcCosine => {
            let (matrices, sigma) = random()?;
            Features::ArcCosine(ArcCosineFeatures::new(&matrices, &sigma)?)
        }
        FeatureMap::Elu => Features::Elu(EluFeatures::new(heads, d)),
        FeatureMap::Favor => {
            let matrices = tensor(weights.orthogonal("random_matrices", shape)?, &shape)?;
            Features::Favor(FavorFeatures::new(&matrices)?)
        }
    })
}
