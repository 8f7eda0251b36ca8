//! The encoder of a source: softmax attention among all of its tokens. The decoder's cross attention keeps the result.

use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::error;
use crate::kernels::norm;
use crate::memory::StateType;
use crate::mixers::cross::read::{Queries, read_cache};
use crate::mixers::rotary::Angles;
use crate::mixers::softmax::Cache;
use crate::nn::{Linear, Mlp, MlpBuffers, RmsNorm};
use crate::weights::{LoadError, TensorList, Weights};

/// Tokens that go through a layer together. Only q, k and v are held for all tokens at once.
const TOKENS: usize = 512;

/// A pre-norm layer with bidirectional attention.
#[derive(Debug)]
struct EncoderLayer {
    input_norm: RmsNorm, // (hidden)
    qkv: Linear,         // (3 heads d, hidden)
    out: Linear,         // (hidden, heads d)
    mlp_norm: RmsNorm,   // (hidden)
    mlp: Mlp,
}

/// The encoder: its layers and the final norm.
#[derive(Debug)]
pub(crate) struct Encoder {
    heads: usize,
    head_dim: usize,
    rope_theta: f64,
    layers: Vec<EncoderLayer>,
    norm: RmsNorm, // (hidden)
}

impl EncoderLayer {
    fn load(config: &DecoderConfig, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        let attention = weights.pp("self_attn");
        let projection = |name: &str| attention.matrix(&format!("{name}_proj.weight"), inner, hidden);
        let norm = |name: &str| RmsNorm::load(weights, name, hidden, config.rms_norm_eps);
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            qkv: Linear::stack(&[projection("q")?, projection("k")?, projection("v")?])?,
            out: Linear::new(&attention.matrix("o_proj.weight", hidden, inner)?, None)?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&weights.pp("mlp"), hidden, config.intermediate_size)?,
        })
    }
}

impl Encoder {
    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(config: &DecoderConfig, layers: usize, list: &mut TensorList) {
        let (hidden, inner) = (config.hidden_size, config.inner_size());
        for layer in 0..layers {
            list.at(&format!("layers.{layer}"), |list| {
                list.floats("input_layernorm.weight", &[hidden]);
                list.at("self_attn", |list| {
                    list.stack(&["q_proj.weight", "k_proj.weight", "v_proj.weight"], inner, hidden);
                    list.matrix("o_proj.weight", hidden, inner);
                });
                list.floats("post_attention_layernorm.weight", &[hidden]);
                list.at("mlp", |list| Mlp::tensors(list, hidden, config.intermediate_size));
            });
        }
        list.floats("norm.weight", &[hidden]);
    }

    /// Reads the tensors of `encoder`.
    pub(crate) fn load(config: &DecoderConfig, layers: usize, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let layers = (0..layers).map(|i| EncoderLayer::load(config, &weights.pp(&format!("layers.{i}"))));
        Ok(Self {
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rope_theta: config.rope_theta,
            layers: layers.collect::<Result<_, _>>()?,
            norm: RmsNorm::load(weights, "norm", config.hidden_size, config.rms_norm_eps)?,
        })
    }

    /// Bytes needed to read a source of `tokens` tokens: the residual stream, q, k and v with their cache, and the keys
    /// and values of cross attention.
    pub(crate) fn working_bytes(&self, tokens: usize, hidden: usize) -> usize {
        let inner = self.heads * self.head_dim;
        tokens.saturating_mul(2 * hidden + 7 * inner).saturating_mul(size_of::<f32>())
    }

    /// x: (tokens, hidden), the embedded source; replaced by the input of cross attention.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &mut [f32], hidden: usize) -> error::Result<()> {
        let (tokens, inner) = (x.len() / hidden, self.heads * self.head_dim);
        let mut angles = Angles::new(self.head_dim, self.rope_theta);
        angles.turn(&[0], tokens);
        let mut qkv = vec![0.0; tokens * 3 * inner];
        let mut cache = Cache::zeros(1, self.heads, tokens, self.head_dim, StateType::F32);
        let some = TOKENS.min(tokens);
        let (mut normed, mut delta) = (vec![0.0; some * hidden], vec![0.0; some * hidden]);
        let (mut h, mut buffer, mut mlp) = (vec![0.0; some * inner], Vec::new(), MlpBuffers::default());
        for layer in &self.layers {
            for (x, qkv) in x.chunks(some * hidden).zip(qkv.chunks_mut(some * 3 * inner)) {
                let normed = &mut normed[..x.len()];
                layer.input_norm.forward(cx, x, normed);
                layer.qkv.forward(cx, normed, qkv);
            }
            angles.rotate(&mut qkv, 3 * inner, 2 * inner);
            // All keys and values are cached before the first query.
            cache.fill(0, &qkv, 3 * inner, inner);
            for (x, q) in x.chunks_mut(some * hidden).zip(qkv.chunks(some * 3 * inner)) {
                let (normed, delta) = (&mut normed[..x.len()], &mut delta[..x.len()]);
                let h = &mut h[..x.len() / hidden * inner];
                read_cache(&cache, Queries { q, stride: 3 * inner, slots: &[0] }, (cx, &mut buffer), h)?;
                layer.out.forward(cx, h, delta);
                norm::add(cx.isa, x, delta);
                layer.mlp_norm.forward(cx, x, normed);
                layer.mlp.forward(cx, normed, &mut mlp, delta);
                norm::add(cx.isa, x, delta);
            }
        }
        for x in x.chunks_mut(some * hidden) {
            let normed = &mut normed[..x.len()];
            self.norm.forward(cx, x, normed);
            x.copy_from_slice(normed);
        }
        Ok(())
    }
}
