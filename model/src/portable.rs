//! RFA-Gate as a chain of candle tensors: the whole decoder in one file, without kernels, threads or slots.
//!
//! Start reading here. In f64 this decoder is also the oracle that tests compare [`crate::Decoder`] with. It reads one
//! token after another, as the paper writes the recurrence (Peng et al., ICLR 2021), and candle can differentiate it.
//! It is tested in f32 and f64 on the CPU.
//!
//! ```no_run
//! use tidegate_model::{DType, Device, Tensor, portable};
//!
//! # fn main() -> candle_core::Result<()> {
//! let folder = "weights/checkpoints/tidegate-tiny".as_ref();
//! let decoder = portable::Decoder::load(folder, DType::F64, &Device::Cpu)?;
//! let mut state = decoder.state(1)?;
//! let logits = decoder.forward(&Tensor::new(&[[0u32, 42, 7]], &Device::Cpu)?, &mut state)?;
//! assert_eq!(logits.dims(), [1, 3, decoder.config().vocab_size]);
//! # Ok(())
//! # }
//! ```
//!
//! Letters in shapes: b is the batch size, n the number of heads, d the length of a head's queries, keys and values, F
//! its features, D its random vectors.

use std::path::Path;

use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_nn::VarBuilder;
use candle_nn::ops::sigmoid;

use crate::config::{Attention, ConfigError, DecoderConfig, FeatureMap, PositionEmbedding};

/// A decoder of RFA layers with the feature map `gaussian`, `arc_cosine` or `elu`.
#[derive(Clone, Debug)]
pub struct Decoder {
    config: DecoderConfig,
    embedding: Tensor, // (vocab, hidden)
    layers: Vec<Layer>,
    norm: Tensor, // (hidden)
    head: Tensor, // (vocab, hidden)
}

#[derive(Clone, Debug)]
struct Layer {
    input_norm: Tensor,             // (hidden)
    qkv: Tensor,                    // (3 n d, hidden)
    conv: Option<Tensor>,           // (kernel, 3 n d)
    w: Option<Tensor>,              // sigma . W~: (n, D, d); none for elu
    gate: Option<(Tensor, Tensor)>, // (n, hidden) and (n)
    output_norm: Option<Tensor>,    // (d)
    out: Tensor,                    // (hidden, n d)
    mlp_norm: Tensor,               // (hidden)
    mlp: [Tensor; 3],               // gate and up (intermediate, hidden), down (hidden, intermediate)
}

/// The state of a batch of texts; its size does not depend on their length.
#[derive(Clone, Debug)]
pub struct State {
    /// Tokens read so far.
    pub position: u64,
    /// The state of each layer.
    pub layers: Vec<LayerState>,
}

/// The state of a layer.
#[derive(Clone, Debug)]
pub struct LayerState {
    /// S, the sum of features times values: (b, n, F, d).
    pub s: Tensor,
    /// z, the sum of features: (b, n, F, 1).
    pub z: Tensor,
    /// c, the sum of weights: (b, n, 1, 1).
    pub c: Tensor,
    /// The last inputs of the convolution, oldest first: (b, kernel - 1, 3 n d).
    pub conv: Option<Tensor>,
}

/// Checks that the decoder supports the config; the error names the key.
///
/// # Errors
/// The model is of another family.
pub fn check(config: &DecoderConfig) -> std::result::Result<(), ConfigError> {
    let refused = |field, bound: &str, found: &dyn std::fmt::Debug| {
        Err(ConfigError::bound(field, format!("{bound} for the candle backend"), format!("{found:?}")))
    };
    match (config.attention, config.feature_map) {
        (Attention::Rfa, FeatureMap::Favor) => {
            refused("feature_map", "gaussian, arc_cosine or elu", &config.feature_map)
        }
        (Attention::Rfa, _) if config.source().is_some() => {
            refused("model_type", "that of a decoder", &config.model_type)
        }
        (Attention::Rfa, _) => Ok(()),
        (other, _) => refused("attention", "rfa", &other),
    }
}

impl Decoder {
    /// Loads `config.json` and `model.safetensors`, and converts all weights to `dtype`.
    ///
    /// # Errors
    /// A file is missing or wrong, or the model is of another family.
    pub fn load(folder: &Path, dtype: DType, device: &Device) -> Result<Self> {
        let config = std::fs::read_to_string(folder.join("config.json")).map_err(Error::wrap)?;
        let config = DecoderConfig::from_json(&config).map_err(Error::wrap)?;
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), device)?;
        Self::new(config, &VarBuilder::from_tensors(tensors, dtype, device))
    }

    /// Builds the decoder from these weights, which may be training variables.
    ///
    /// # Errors
    /// A tensor is missing or has the wrong shape, or the model is of another family.
    pub fn new(config: DecoderConfig, weights: &VarBuilder<'_>) -> Result<Self> {
        check(&config).map_err(Error::wrap)?;
        let model = weights.pp("model");
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = model.get((vocab, hidden), "embed_tokens.weight")?;
        let head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            weights.get((vocab, hidden), "lm_head.weight")?
        };
        let layers = model.pp("layers");
        let layers = (0..config.num_hidden_layers).map(|i| Layer::new(&config, &layers.pp(i)));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            norm: model.get(hidden, "norm.weight")?,
            config,
            embedding,
            head,
        })
    }

    /// The config of the decoder.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// The state of `batch` empty texts.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn state(&self, batch: usize) -> Result<State> {
        let config = &self.config;
        let (n, d, features) = (config.num_attention_heads, config.head_dim, config.features());
        let zeros = |shape: &[usize]| Tensor::zeros(shape, self.norm.dtype(), self.norm.device());
        let layer = || -> Result<_> {
            let conv = (config.conv_kernel > 0).then(|| zeros(&[batch, config.conv_kernel - 1, 3 * n * d]));
            Ok(LayerState {
                s: zeros(&[batch, n, features, d])?,
                z: zeros(&[batch, n, features, 1])?,
                c: zeros(&[batch, n, 1, 1])?,
                conv: conv.transpose()?,
            })
        };
        Ok(State { position: 0, layers: (0..config.num_hidden_layers).map(|_| layer()).collect::<Result<_>>()? })
    }

    /// Reads the next tokens of each text. ids: (b, time) u32 -> logits (b, time, vocab)
    ///
    /// # Errors
    /// An id is outside the vocabulary, or the state is for another batch size.
    pub fn forward(&self, ids: &Tensor, state: &mut State) -> Result<Tensor> {
        let logits = (0..ids.dim(1)?).map(|t| self.step(&ids.narrow(1, t, 1)?.squeeze(1)?, state));
        Tensor::stack(&logits.collect::<Result<Vec<_>>>()?, 1)
    }

    /// Reads the next token of each text. ids: (b) u32 -> logits (b, vocab)
    ///
    /// # Errors
    /// As for [`Self::forward`].
    pub fn step(&self, ids: &Tensor, state: &mut State) -> Result<Tensor> {
        let mut x = self.embedding.index_select(&ids.contiguous()?, 0)?;
        for (layer, layer_state) in self.layers.iter().zip(&mut state.layers) {
            x = layer.forward(&self.config, &x, state.position, layer_state)?;
        }
        state.position += 1;
        linear(&rms_norm(&x, &self.norm, self.config.rms_norm_eps)?, &self.head)
    }
}

impl Layer {
    fn new(config: &DecoderConfig, weights: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, n, d) = (config.hidden_size, config.num_attention_heads, config.head_dim);
        let (inner, intermediate) = (n * d, config.intermediate_size);
        let (attention, mlp) = (weights.pp("self_attn"), weights.pp("mlp"));
        let three = |name: &str, shape: &[usize]| -> Result<_> {
            let parts = ["q", "k", "v"].map(|part| attention.get(shape, &format!("{part}_{name}.weight")));
            Tensor::cat(&parts.into_iter().collect::<Result<Vec<_>>>()?, 0)
        };
        let conv = || -> Result<_> { three("conv1d", &[inner, 1, config.conv_kernel])?.squeeze(1)?.t()?.contiguous() };
        let w = || -> Result<_> {
            let random = attention.get((n, config.proj_dim, d), "random_matrices")?;
            random.broadcast_mul(&attention.get((n, d), "sigma")?.unsqueeze(1)?)
        };
        let gate = || -> Result<_> { Ok((attention.get((n, hidden), "gate.weight")?, attention.get(n, "gate.bias")?)) };
        Ok(Self {
            input_norm: weights.get(hidden, "input_layernorm.weight")?,
            qkv: three("proj", &[inner, hidden])?,
            conv: (config.conv_kernel > 0).then(conv).transpose()?,
            w: config.feature_map.has_random_matrices().then(w).transpose()?,
            gate: config.gate.then(gate).transpose()?,
            output_norm: config.output_norm.then(|| attention.get(d, "o_norm.weight")).transpose()?,
            out: attention.get((hidden, inner), "o_proj.weight")?,
            mlp_norm: weights.get(hidden, "post_attention_layernorm.weight")?,
            mlp: [
                mlp.get((intermediate, hidden), "gate_proj.weight")?,
                mlp.get((intermediate, hidden), "up_proj.weight")?,
                mlp.get((hidden, intermediate), "down_proj.weight")?,
            ],
        })
    }

    /// Computes `x + attention(norm(x))`, then `x + mlp(norm(x))`. x: (b, hidden)
    fn forward(&self, config: &DecoderConfig, x: &Tensor, position: u64, state: &mut LayerState) -> Result<Tensor> {
        let eps = config.rms_norm_eps;
        let x = (x + self.attention(config, &rms_norm(x, &self.input_norm, eps)?, position, state)?)?;
        let [gate, up, down] = &self.mlp;
        let normed = rms_norm(&x, &self.mlp_norm, eps)?;
        x + linear(&(linear(&normed, gate)?.silu()? * linear(&normed, up)?)?, down)?
    }

    /// Computes one token: its key and value enter the sums, then its query reads them. x: (b, hidden)
    fn attention(&self, config: &DecoderConfig, x: &Tensor, position: u64, state: &mut LayerState) -> Result<Tensor> {
        let (n, d) = (config.num_attention_heads, config.head_dim);
        let qkv = self.convolved(linear(x, &self.qkv)?, state)?.reshape(((), 3, n, d))?;
        let head = |i: usize| qkv.narrow(1, i, 1)?.squeeze(1)?.contiguous();
        let turned = |x: Tensor| match config.position_embedding {
            PositionEmbedding::None => Ok(x),
            PositionEmbedding::Rope => rotated(&x, position, config.rope_theta),
        };
        let (q, k, v) = (turned(head(0)?)?, turned(head(1)?)?, head(2)?.unsqueeze(2)?);
        let phi_q = self.features(config.feature_map, &q)?.unsqueeze(2)?; // (b, n, 1, F)
        let phi_k = self.features(config.feature_map, &k)?.unsqueeze(3)?; // (b, n, F, 1)

        // Equation 7: S <- g S + (1 - g) phi(k) v^T, and likewise for z and c; without a gate nothing decays.
        let (keep, take) = match &self.gate {
            Some((weight, bias)) => {
                let g = sigmoid(&linear(x, weight)?.broadcast_add(bias)?)?.reshape(((), n, 1, 1))?;
                let take = g.affine(-1.0, 1.0)?;
                (g, take)
            }
            None => (state.c.ones_like()?, state.c.ones_like()?),
        };
        let weighted = phi_k.broadcast_mul(&take)?;
        state.s = (state.s.broadcast_mul(&keep)? + weighted.matmul(&v)?)?;
        state.z = (state.z.broadcast_mul(&keep)? + &weighted)?;
        state.c = ((&state.c * &keep)? + &take)?;

        // Equation 5: h = phi(q) S / (phi(q) . z). Products of sines and cosines estimate a positive number but may
        // themselves be negative, so the denominator has a floor, which is a share of all the weight that has entered.
        let eps = config.denominator_floor();
        let floor = (&state.c * eps)?.maximum(f64::from(f32::MIN_POSITIVE))?;
        let denominator = phi_q.matmul(&state.z)?.maximum(&floor)?;
        let h = phi_q.matmul(&state.s)?.broadcast_div(&denominator)?.squeeze(2)?; // (b, n, d)
        let h = match &self.output_norm {
            Some(weight) => rms_norm(&h, weight, config.rms_norm_eps)?,
            None => h,
        };
        linear(&h.flatten_from(1)?, &self.out)
    }

    /// Computes the short convolution over a token and the ones before it, then SiLU. qkv: (b, 3 n d)
    fn convolved(&self, qkv: Tensor, state: &mut LayerState) -> Result<Tensor> {
        let (Some(taps), Some(before)) = (&self.conv, &state.conv) else { return Ok(qkv) };
        let window = Tensor::cat(&[before, &qkv.unsqueeze(1)?], 1)?; // (b, kernel, 3 n d)
        state.conv = Some(window.narrow(1, 1, taps.dim(0)? - 1)?);
        window.broadcast_mul(taps)?.sum(1)?.silu()
    }

    /// x: (b, n, d) -> phi (b, n, F)
    fn features(&self, map: FeatureMap, x: &Tensor) -> Result<Tensor> {
        let Some(w) = &self.w else { return x.elu(1.0)? + 1.0 };
        // x^ = x / (|x| + 1e-3), then W x^ head by head: (b, n, D)
        let length = (x.sqr()?.sum_keepdim(D::Minus1)?.sqrt()? + 1e-3)?;
        let unit = x.broadcast_div(&length)?.transpose(0, 1)?.contiguous()?;
        let angles = unit.matmul(&w.transpose(1, 2)?.contiguous()?)?.transpose(0, 1)?.contiguous()?;
        let scale = (1.0 / w.dim(1)? as f64).sqrt();
        match map {
            FeatureMap::ArcCosine => angles.relu()? * scale,
            _ => Tensor::cat(&[angles.sin()?, angles.cos()?], D::Minus1)? * scale,
        }
    }
}

/// `x W^T`. x: (b, in), weight: (out, in)
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// `x / sqrt(mean(x^2) + eps) . weight` over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?)?.broadcast_mul(weight)
}

/// Rotates pairs of elements, one from each half of a head, by angles that grow with the position (Su et al., 2021).
/// Angles are f64: at position ten million, an f32 angle is off by whole turns. x: (b, n, d)
fn rotated(x: &Tensor, position: u64, theta: f64) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let angles = (0..half).map(|i| position as f64 * theta.powf(-(i as f64) / half as f64));
    let angles = Tensor::from_iter(angles, &Device::Cpu)?;
    let placed = |of: Tensor| of.to_dtype(x.dtype())?.to_device(x.device());
    let (cos, sin) = (placed(angles.cos()?)?, placed(angles.sin()?)?);
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}
