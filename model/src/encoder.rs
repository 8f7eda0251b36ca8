//! The encoder: a source's tokens, each of which sees all others by softmax attention, before the decoder's cross
//! attention makes a state of constant size of them.

use candle_core::Result;

use crate::attention::rotary::Angles;
use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::kernels::norm;
use crate::memory::{Cache, StateType};
use crate::nn::{Linear, Mlp, MlpBuffers, RmsNorm};
use crate::ops::cross::{self, Queries};
use crate::weights::{LoadError, Weights};

/// A pre-norm block of attention both ways.
#[derive(Debug)]
struct EncoderBlock {
    input_norm: RmsNorm, // (hidden)
    qkv: Linear,         // (3 heads d, hidden)
    out: Linear,         // (hidden, heads d)
    mlp_norm: RmsNorm,   // (hidden)
    mlp: Mlp,
}

/// Blocks, and a norm.
#[derive(Debug)]
pub(crate) struct Encoder {
    heads: usize,
    head_dim: usize,
    rope_theta: f64,
    blocks: Vec<EncoderBlock>,
    norm: RmsNorm, // (hidden)
}

/// An RMSNorm of the residual stream.
fn norm(config: &DecoderConfig, weights: &Weights<'_>, name: &str) -> std::result::Result<RmsNorm, LoadError> {
    let numbers = weights.numbers(&format!("{name}.weight"), &[config.hidden_size])?;
    Ok(RmsNorm::new(numbers, config.rms_norm_eps))
}

impl EncoderBlock {
    fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
        let (hidden, inner, width) = (config.hidden_size, config.inner_size(), config.intermediate_size);
        let (attention, mlp) = (weights.pp("self_attn"), weights.pp("mlp"));
        let projection = |name: &str| attention.matrix(&format!("{name}_proj.weight"), inner, hidden);
        Ok(Self {
            input_norm: norm(config, weights, "input_layernorm")?,
            qkv: Linear::stack(&[projection("q")?, projection("k")?, projection("v")?])?,
            out: Linear::new(&attention.matrix("o_proj.weight", hidden, inner)?, None)?,
            mlp_norm: norm(config, weights, "post_attention_layernorm")?,
            mlp: Mlp::new(
                mlp.matrix("gate_proj.weight", width, hidden)?,
                mlp.matrix("up_proj.weight", width, hidden)?,
                &mlp.matrix("down_proj.weight", hidden, width)?,
            )?,
        })
    }
}

impl Encoder {
    /// Reads the tensors of `encoder`.
    pub(crate) fn new(
        config: &DecoderConfig,
        layers: usize,
        weights: &Weights<'_>,
    ) -> std::result::Result<Self, LoadError> {
        let blocks = (0..layers).map(|i| EncoderBlock::new(config, &weights.pp(&format!("layers.{i}"))));
        Ok(Self {
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rope_theta: config.rope_theta,
            blocks: blocks.collect::<std::result::Result<_, _>>()?,
            norm: norm(config, weights, "norm")?,
        })
    }

    /// Bytes of the matrices.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.qkv.bytes() + block.out.bytes() + block.mlp.bytes()).sum()
    }

    /// x: (tokens, hidden), the embedded source, changed on the way -> what cross attention reads, the same shape.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &mut [f32], hidden: usize) -> Result<Vec<f32>> {
        let (tokens, inner) = (x.len() / hidden, self.heads * self.head_dim);
        let mut angles = Angles::new(self.head_dim, self.rope_theta);
        angles.turn(&[0], tokens);
        let (mut normed, mut delta) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let (mut qkv, mut h) = (vec![0.0; tokens * 3 * inner], vec![0.0; tokens * inner]);
        let (mut buffer, mut mlp) = (Vec::new(), MlpBuffers::default());
        let mut cache = Cache::zeros(1, self.heads, tokens, self.head_dim, StateType::F32);
        for block in &self.blocks {
            block.input_norm.forward(cx, x, &mut normed);
            block.qkv.forward(cx, &normed, &mut qkv);
            angles.rotate(&mut qkv, 3 * inner, 2 * inner);
            // Every token's key and value first, then all queries over all of them.
            let kv = cross::cached(&qkv, (3 * inner, inner), (self.heads, self.head_dim), tokens);
            cache.write(0, &kv, tokens as u64);
            let queries = Queries { q: &qkv, stride: 3 * inner, slots: &[0] };
            cross::read_cache(&cache, queries, (cx, &mut buffer), &mut h)?;
            block.out.forward(cx, &h, &mut delta);
            norm::add(cx.isa, x, &delta);
            block.mlp_norm.forward(cx, x, &mut normed);
            block.mlp.forward(cx, &normed, &mut mlp, &mut delta);
            norm::add(cx.isa, x, &delta);
        }
        self.norm.forward(cx, x, &mut normed);
        Ok(normed)
    }
}
