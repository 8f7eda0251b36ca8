//! The reference implementation: all of Mamba-2, token by token, in f64. It is slow and simple; tests compare the
//! serving layers with it.

use std::collections::BTreeMap;

use crate::config::DecoderConfig;

/// A model: its config and its tensors by name, row-major.
#[derive(Clone, Debug)]
pub struct Model {
    /// The config, which gives the shape.
    pub config: DecoderConfig,
    /// Every tensor of the checkpoint.
    pub tensors: BTreeMap<String, Vec<f64>>,
}

/// The memory of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerMemory {
    /// S of each head: (heads, N, d), one row per element of B.
    pub s: Vec<f64>,
    /// The last inputs of the convolution, oldest first: (kernel - 1, channels).
    pub inputs: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `x / sqrt(mean(x^2) + eps) weight`.
fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

impl Model {
    /// The memory of an empty text.
    pub fn new_memory(&self) -> Vec<LayerMemory> {
        let (config, space) = (&self.config, self.config.state_space.unwrap_or_default());
        let s = vec![0.0; config.inner_size() * space.state_size];
        let inputs = vec![0.0; (config.conv_kernel - 1) * space.channels(config.inner_size())];
        vec![LayerMemory { s, inputs }; config.num_hidden_layers]
    }

    /// Computes W x + b; b is 0 if there is none.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[&format!("{name}.weight")];
        let products = weight.chunks_exact(x.len()).map(|row| dot(row, x));
        match self.tensors.get(&format!("{name}.bias")) {
            Some(bias) => products.zip(bias).map(|(y, b)| y + b).collect(),
            None => products.collect(),
        }
    }

    /// Reads one token -> logits (vocab)
    ///
    /// # Panics
    /// If a tensor is missing, or the token is outside the vocabulary.
    pub fn step(&self, token: u32, memory: &mut [LayerMemory]) -> Vec<f64> {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let mut x = self.tensors["backbone.embeddings.weight"][token as usize * hidden..][..hidden].to_vec();
        for (layer, memory) in memory.iter_mut().enumerate() {
            let name = format!("backbone.layers.{layer}");
            let normed = rms_norm(&x, &self.tensors[&format!("{name}.norm.weight")], eps);
            let mixed = self.mixer(&format!("{name}.mixer"), &normed, memory);
            x.iter_mut().zip(mixed).for_each(|(x, mixed)| *x += mixed);
        }
        self.linear("lm_head", &rms_norm(&x, &self.tensors["backbone.norm_f.weight"], eps))
    }

    /// (z, u, dt) = W_in x; (x, B, C) = silu(conv(u) + b); dt = clamp(log(1 + exp(dt + bias)), limits). Then, for each
    /// head, with B and C of its group and A = -exp(`A_log`),
    ///
    /// - S <- exp(dt A) S + dt B x^T
    /// - y = S^T C + D x
    ///
    /// -> W_out norm(y silu(z))
    fn mixer(&self, name: &str, x: &[f64], memory: &mut LayerMemory) -> Vec<f64> {
        let at = |part: &str| &self.tensors[&format!("{name}.{part}")];
        let (config, space) = (&self.config, self.config.state_space.unwrap_or_default());
        let (heads, d, n, kernel) = (config.num_attention_heads, config.head_dim, space.state_size, config.conv_kernel);
        let (inner, groups) = (heads * d, space.n_groups);
        let channels = inner + 2 * groups * n;
        let projected = self.linear(&format!("{name}.in_proj"), x);
        let (z, rest) = projected.split_at(inner);
        let (u, steps) = rest.split_at(channels);

        memory.inputs.extend(u);
        let convolved: Vec<f64> = (0..channels)
            .map(|channel| {
                let taps = &at("conv1d.weight")[channel * kernel..][..kernel];
                let sum: f64 = (0..kernel).map(|j| taps[j] * memory.inputs[j * channels + channel]).sum();
                silu(sum + self.tensors.get(&format!("{name}.conv1d.bias")).map_or(0.0, |bias| bias[channel]))
            })
            .collect();
        memory.inputs.drain(..channels);

        let mut gated = Vec::with_capacity(inner);
        for (head, s) in memory.s.chunks_exact_mut(n * d).enumerate() {
            let group = head / (heads / groups);
            let x = &convolved[head * d..][..d];
            let (b, c) = (&convolved[inner + group * n..][..n], &convolved[inner + (groups + group) * n..][..n]);
            let dt = (steps[head] + at("dt_bias")[head]).exp().ln_1p();
            let dt = dt.clamp(space.time_step_limit.0, space.greatest_step());
            let keep = (-dt * at("A_log")[head].exp()).exp();
            for (j, row) in s.chunks_exact_mut(d).enumerate() {
                for (s, x) in row.iter_mut().zip(x) {
                    *s = keep * *s + dt * b[j] * x;
                }
            }
            for i in 0..d {
                let y = (0..n).map(|j| c[j] * s[j * d + i]).sum::<f64>() + at("D")[head] * x[i];
                gated.push(y * silu(z[head * d + i]));
            }
        }
        let group = inner / space.norm_groups;
        let parts = gated.chunks_exact(group).zip(at("norm.weight").chunks_exact(group));
        let normed: Vec<f64> = parts.flat_map(|(y, weight)| rms_norm(y, weight, config.rms_norm_eps)).collect();
        self.linear(&format!("{name}.out_proj"), &normed)
    }
}
