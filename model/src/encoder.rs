//! The encoder: a source's tokens, each of which sees all others by softmax attention, before the decoder's cross
//! attention makes a state of constant size of them.

use candle_core::Result;

use crate::mixers::rotary::Angles;
use crate::compute::Compute;
use crate::config::DecoderConfig;
use crate::kernels::norm;
use crate::memory::StateType;
use crate::mixers::softmax::Cache;
use crate::nn::{Linear, Mlp, MlpBuffers, RmsNorm};
use crate::mixers::cross::read::{self as cross, Queries};
use crate::weights::{LoadError, Weights};

/// Tokens that go through a block together: what all of them need at once is q, k and v alone.
const TOKENS: usize = 512;

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

impl EncoderBlock {
    fn new(config: &DecoderConfig, weights: &Weights<'_>) -> std::result::Result<Self, LoadError> {
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
            norm: RmsNorm::load(weights, "norm", config.hidden_size, config.rms_norm_eps)?,
        })
    }

    /// Bytes that a source of so many tokens takes while it is read, most of all: the residual stream and what is made of
    /// it, q, k and v with their cache, and cross attention's keys and values.
    pub(crate) fn working_bytes(&self, tokens: usize, hidden: usize) -> usize {
        let inner = self.heads * self.head_dim;
        tokens.saturating_mul(2 * hidden + 7 * inner).saturating_mul(size_of::<f32>())
    }

    /// x: (tokens, hidden), the embedded source, which becomes what cross attention reads.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &mut [f32], hidden: usize) -> Result<()> {
        let (tokens, inner) = (x.len() / hidden, self.heads * self.head_dim);
        let mut angles = Angles::new(self.head_dim, self.rope_theta);
        angles.turn(&[0], tokens);
        let mut qkv = vec![0.0; tokens * 3 * inner];
        let mut cache = Cache::zeros(1, self.heads, tokens, self.head_dim, StateType::F32);
        let some = TOKENS.min(tokens);
        let (mut normed, mut delta) = (vec![0.0; some * hidden], vec![0.0; some * hidden]);
        let (mut h, mut buffer, mut mlp) = (vec![0.0; some * inner], Vec::new(), MlpBuffers::default());
        for block in &self.blocks {
            for (x, qkv) in x.chunks(some * hidden).zip(qkv.chunks_mut(some * 3 * inner)) {
                let normed = &mut normed[..x.len()];
                block.input_norm.forward(cx, x, normed);
                block.qkv.forward(cx, normed, qkv);
            }
            angles.rotate(&mut qkv, 3 * inner, 2 * inner);
            // Every token's key and value first, then all queries over all of them.
            cache.fill(0, &qkv, 3 * inner, inner);
            for (x, q) in x.chunks_mut(some * hidden).zip(qkv.chunks(some * 3 * inner)) {
                let (normed, delta) = (&mut normed[..x.len()], &mut delta[..x.len()]);
                let h = &mut h[..x.len() / hidden * inner];
                cross::read_cache(&cache, Queries { q, stride: 3 * inner, slots: &[0] }, (cx, &mut buffer), h)?;
                block.out.forward(cx, h, delta);
                norm::add(cx.isa, x, delta);
                block.mlp_norm.forward(cx, x, normed);
                block.mlp.forward(cx, normed, &mut mlp, delta);
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
