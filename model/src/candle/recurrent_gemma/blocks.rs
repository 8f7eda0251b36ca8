//! The blocks of RecurrentGemma, as chains of candle tensors. Each feeds one token to one sequence.

use candle_core::{Result, Tensor};
use candle_nn::ops::{sigmoid, softmax_last_dim};
use candle_nn::{Linear, Module, VarBuilder, linear, linear_b, rotary_emb};

use super::config::Config;

/// The exponent of the recurrence's decay (c in the paper).
const SHARPNESS: f64 = 8.0;

/// An RMSNorm. The checkpoint stores its weight minus 1.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Tensor,
    eps: f32,
}

impl Norm {
    pub(super) fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        Ok(Self { weight: (weights.get(config.hidden, "weight")? + 1.0)?, eps: config.norm_eps as f32 })
    }
}

impl Module for Norm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(x, &self.weight, self.eps)
    }
}

/// The blocks of a gate: one matrix for each head.
#[derive(Debug)]
struct Blocks {
    weight: Tensor,
    bias: Tensor,
}

impl Blocks {
    fn new(config: &Config, weights: &VarBuilder<'_>, name: &str) -> Result<Self> {
        let (heads, width) = (config.heads, config.lru / config.heads);
        Ok(Self {
            weight: weights.get((heads, width, width), &format!("{name}_weight"))?,
            bias: weights.get((heads, width), &format!("{name}_bias"))?.reshape((1, config.lru))?,
        })
    }

    /// x (1, lru) -> gate (1, lru), between 0 and 1
    fn gate(&self, x: &Tensor) -> Result<Tensor> {
        let (heads, width, _) = self.weight.dims3()?;
        let product = x.reshape((heads, 1, width))?.matmul(&self.weight)?;
        sigmoid(&(product.reshape(x.shape())? + &self.bias)?)
    }
}

/// A recurrent block: a convolution, then the RG-LRU, times a gate.
#[derive(Debug)]
struct Recurrent {
    gate: Linear,
    input: Linear,
    output: Linear,
    /// The convolution's weight of each input, oldest first (1, lru), and its bias.
    taps: Vec<Tensor>,
    bias: Tensor,
    input_gate: Blocks,
    decay_gate: Blocks,
    /// The logarithm of the decay when the gate is 1 (1, lru).
    decay: Tensor,
}

impl Recurrent {
    fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let Config { hidden, lru, taps, .. } = *config;
        let (conv, lru_weights) = (weights.pp("conv_1d"), weights.pp("rg_lru"));
        let taps_weight = conv.get((lru, 1, taps + 1), "weight")?.reshape((lru, taps + 1))?.t()?.contiguous()?;
        let parameter = lru_weights.get(lru, "recurrent_param")?.reshape((1, lru))?;
        Ok(Self {
            gate: linear(hidden, lru, weights.pp("linear_y"))?,
            input: linear(hidden, lru, weights.pp("linear_x"))?,
            output: linear(lru, hidden, weights.pp("linear_out"))?,
            taps: taps_weight.chunk(taps + 1, 0)?,
            bias: conv.get(lru, "bias")?.reshape((1, lru))?,
            input_gate: Blocks::new(config, &lru_weights, "input_gate")?,
            decay_gate: Blocks::new(config, &lru_weights, "recurrent_gate")?,
            decay: (softplus(&parameter)? * -SHARPNESS)?,
        })
    }

    /// x (1, hidden) -> (1, hidden). `state` holds h, then the last inputs.
    fn step(&self, x: &Tensor, position: u64, state: &mut [Tensor]) -> Result<Tensor> {
        let input = self.input.forward(x)?;
        let (h, inputs) = state.split_first_mut().expect("the shape has h");
        let mut u = self.bias.clone();
        for (weight, input) in self.taps.iter().zip(inputs.iter().chain([&input])) {
            u = (u + weight * input)?;
        }
        if let Some(oldest) = inputs.first_mut() {
            *oldest = input;
            inputs.rotate_left(1);
        }
        let log_decay = (self.decay_gate.gate(&u)? * &self.decay)?;
        let gated = (self.input_gate.gate(&u)? * &u)?;
        // The first input of a text is not scaled.
        *h = if position == 0 {
            gated
        } else {
            let scale = (1.0 - (&log_decay * 2.0)?.exp()?)?.sqrt()?;
            ((log_decay.exp()? * &*h)? + gated * scale)?
        };
        self.output.forward(&(&*h * self.gate.forward(x)?.gelu()?)?)
    }
}

/// log(1 + exp(x)), without overflow.
fn softplus(x: &Tensor) -> Result<Tensor> {
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

/// A block of softmax attention over a window.
#[derive(Debug)]
struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: usize,
    key_heads: usize,
    window: usize,
    head: usize,
}

/// The cosines and sines of a position, each (1, rotated channels / 2).
pub(super) type Angles = [Tensor; 2];

impl Attention {
    fn new(config: &Config, weights: &VarBuilder<'_>) -> Result<Self> {
        let Config { hidden, heads, key_heads, window, attention_bias: bias, .. } = *config;
        let head = config.head();
        let new = |heads, name: &str| linear_b(hidden, heads * head, bias, weights.pp(name));
        Ok(Self {
            query: new(heads, "q_proj")?,
            key: new(key_heads, "k_proj")?,
            value: new(key_heads, "v_proj")?,
            output: linear(hidden, hidden, weights.pp("o_proj"))?,
            heads,
            key_heads,
            window,
            head,
        })
    }

    /// Rotates the first half of each head: x (1, heads × head) -> (heads, head)
    fn rotated(&self, x: &Tensor, heads: usize, [cos, sin]: &Angles) -> Result<Tensor> {
        let x = x.reshape((1, heads, 1, self.head))?;
        let half = self.head / 2;
        let turned = rotary_emb::rope(&x.narrow(3, 0, half)?.contiguous()?, cos, sin)?;
        Tensor::cat(&[&turned, &x.narrow(3, half, self.head - half)?], 3)?.reshape((heads, self.head))
    }

    /// x (1, hidden) -> (1, hidden). `state` holds the keys, then the values.
    fn step(&self, x: &Tensor, position: u64, angles: &Angles, state: &mut [Tensor]) -> Result<Tensor> {
        let query = self.rotated(&self.query.forward(x)?, self.heads, angles)?;
        let key = self.rotated(&self.key.forward(x)?, self.key_heads, angles)?;
        let value = self.value.forward(x)?;
        let (row, seen) =
            ((position % self.window as u64) as usize, position.saturating_add(1).min(self.window as u64));
        let [keys, values] = state else { unreachable!("the shape has two tensors") };
        let add = |all: &mut Tensor, new: &Tensor| {
            // The old tensor may be shared with other conversations, so it is not changed in place.
            *all = all.slice_scatter0(&new.reshape((1, self.key_heads, self.head))?, row)?;
            all.narrow(0, 0, seen as usize)?.transpose(0, 1)?.contiguous()
        };
        let (keys, values) = (add(keys, &key)?, add(values, &value)?);
        let query = query.reshape((self.key_heads, self.heads / self.key_heads, self.head))?;
        let scores = (query.matmul(&keys.t()?)? / (self.head as f64).sqrt())?;
        let read = softmax_last_dim(&scores)?.matmul(&values)?;
        self.output.forward(&read.reshape((1, self.heads * self.head))?)
    }
}

#[derive(Debug)]
enum Mixer {
    Recurrent(Recurrent),
    Attention(Attention),
}

/// A layer: the mixer, then a gated MLP, each after a norm and added to its input.
#[derive(Debug)]
pub(super) struct Layer {
    before_mixer: Norm,
    mixer: Mixer,
    before_mlp: Norm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    pub(super) fn new(config: &Config, attention: bool, weights: &VarBuilder<'_>) -> Result<Self> {
        let (block, mlp) = (weights.pp("temporal_block"), weights.pp("mlp_block"));
        let mixer = if attention {
            Mixer::Attention(Attention::new(config, &block)?)
        } else {
            Mixer::Recurrent(Recurrent::new(config, &block)?)
        };
        Ok(Self {
            before_mixer: Norm::new(config, &weights.pp("temporal_pre_norm"))?,
            mixer,
            before_mlp: Norm::new(config, &weights.pp("channel_pre_norm"))?,
            gate: linear(config.hidden, config.inner, mlp.pp("gate_proj"))?,
            up: linear(config.hidden, config.inner, mlp.pp("up_proj"))?,
            down: linear(config.inner, config.hidden, mlp.pp("down_proj"))?,
        })
    }

    /// Number of tensors in this layer's state.
    pub(super) fn tensors(&self) -> usize {
        match &self.mixer {
            Mixer::Recurrent(block) => block.taps.len(),
            Mixer::Attention(_) => 2,
        }
    }

    /// x (1, hidden) -> (1, hidden). `state` holds this layer's tensors.
    pub(super) fn step(&self, x: &Tensor, position: u64, angles: &Angles, state: &mut [Tensor]) -> Result<Tensor> {
        let normed = self.before_mixer.forward(x)?;
        let mixed = match &self.mixer {
            Mixer::Recurrent(block) => block.step(&normed, position, state)?,
            Mixer::Attention(block) => block.step(&normed, position, angles, state)?,
        };
        let x = (mixed + x)?;
        let normed = self.before_mlp.forward(&x)?;
        let gated = (self.gate.forward(&normed)?.gelu()? * self.up.forward(&normed)?)?;
        self.down.forward(&gated)? + x
    }
}
