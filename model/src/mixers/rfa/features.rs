//! The learned parts that random feature attention shares with the hybrid and with cross attention: the gate and the
//! feature map.

use candle_core::{Device, Tensor};

use crate::compute::{Compute, sized};
use crate::config::{ConfigError, DecoderConfig, FeatureMap, GivenKeys, PROJ_DIM_MAX, within};
use crate::feature_map::{ArcCosineFeatures, EluFeatures, FavorFeatures, Features, GaussianFeatures};
use crate::nn::Linear;
use crate::weights::{LoadError, TensorList, Weights};

/// The gates of a layer's heads: (heads, hidden) with a bias, or none.
#[derive(Debug)]
pub(crate) struct Gate(Option<Linear>);

impl Gate {
    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(config: &DecoderConfig, list: &mut TensorList) {
        if config.gate {
            // The gate is small and decides what the state keeps, so it is not quantized.
            list.floats("gate.weight", &[config.num_attention_heads, config.hidden_size]);
            list.floats("gate.bias", &[config.num_attention_heads]);
        }
    }

    /// Loads `gate.weight` and `gate.bias`.
    pub(crate) fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        if !config.gate {
            return Ok(Self(None));
        }
        let heads = config.num_attention_heads;
        let bias = weights.numbers("gate.bias", &[heads])?;
        let weight = weights.stored_matrix("gate.weight", heads, config.hidden_size)?;
        Ok(Self(Some(Linear::new(&weight, Some(bias))?)))
    }

    /// Bytes of the matrix and its bias.
    pub(crate) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, Linear::bytes)
    }

    /// Computes the gate logits of `tokens` tokens. x: (tokens, hidden) -> (tokens, heads)
    pub(crate) fn logits<'a>(
        &self,
        cx: &mut Compute,
        x: &[f32],
        tokens: usize,
        buffer: &'a mut Vec<f32>,
    ) -> Option<&'a [f32]> {
        let gate = self.0.as_ref()?;
        let logits = sized(buffer, tokens * gate.width());
        gate.forward(cx, x, logits);
        Some(logits)
    }
}

/// Rejects a config without `proj_dim` if its feature map needs one.
pub(crate) fn require_proj_dim(config: &DecoderConfig, given: &GivenKeys) -> Result<(), ConfigError> {
    if config.feature_map.has_random_matrices() && given.proj_dim.is_none() {
        return Err(ConfigError::bound("proj_dim", format!("between 1 and {PROJ_DIM_MAX}"), "none"));
    }
    Ok(())
}

/// Checks `proj_dim`.
pub(crate) fn validate(config: &DecoderConfig) -> Result<(), ConfigError> {
    if config.feature_map.has_random_matrices() {
        return within("proj_dim", config.proj_dim, 1, PROJ_DIM_MAX);
    }
    if config.proj_dim > 0 {
        let bound = format!("0 or absent where feature_map is {}", config.feature_map.name());
        return Err(ConfigError::bound("proj_dim", bound, config.proj_dim));
    }
    Ok(())
}

/// Rejects feature maps that are not in `allowed`. bound: what is allowed and where, for the error
pub(crate) fn require(allowed: &[FeatureMap], config: &DecoderConfig, bound: String) -> Result<(), ConfigError> {
    if allowed.contains(&config.feature_map) {
        return Ok(());
    }
    Err(ConfigError::bound("feature_map", bound, config.feature_map.name()))
}

/// Number of features per head (F).
pub(crate) fn count(config: &DecoderConfig) -> usize {
    config.feature_map.features(config.proj_dim, config.head_dim)
}

/// The tensors that [`load`] reads. vectors: random vectors per head
pub(crate) fn tensors(config: &DecoderConfig, vectors: usize, list: &mut TensorList) {
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    if config.feature_map.has_sigma() {
        list.floats("sigma", &[heads, d]);
    }
    if config.feature_map.has_random_matrices() {
        list.fixed("random_matrices", &[heads, vectors, d]);
    }
}

/// Loads the feature map of one layer's heads: `sigma` and `random_matrices`. vectors: random vectors per head
pub(crate) fn load(config: &DecoderConfig, vectors: usize, weights: &Weights<'_>) -> Result<Features, LoadError> {
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    let shape = [heads, vectors, d];
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
