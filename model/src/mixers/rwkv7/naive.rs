//! The reference implementation: all of RWKV-7, token by token, in f64. It is slow and simple; tests compare the
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
    /// S of each head: (heads, d, d), one row per key element.
    pub s: Vec<f64>,
    /// The last input of the time mix: (hidden).
    pub time_input: Vec<f64>,
    /// The last input of the channel mix: (hidden).
    pub channel_input: Vec<f64>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// W x. w: (rows, x.len())
fn product(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Combines two slices element by element.
fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

/// `(x - mean) / sqrt(variance + eps)`.
fn normalize(x: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
    x.iter().map(|v| (v - mean) / (variance + eps).sqrt()).collect()
}

impl Model {
    /// The memory of an empty text.
    pub fn new_memory(&self) -> Vec<LayerMemory> {
        let (hidden, d) = (self.config.hidden_size, self.config.head_dim);
        let (s, zeros) = (vec![0.0; hidden * d], vec![0.0; hidden]);
        let layer = LayerMemory { s, time_input: zeros.clone(), channel_input: zeros };
        vec![layer; self.config.num_hidden_layers]
    }

    fn layer_norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (weight, bias) = (&self.tensors[&format!("{name}.weight")], &self.tensors[&format!("{name}.bias")]);
        zip(&zip(&normalize(x, self.config.rms_norm_eps), weight, |x, w| x * w), bias, |x, b| x + b)
    }

    /// `up f(down x)`.
    fn low_rank(&self, name: &str, x: &[f64], f: impl Fn(f64) -> f64) -> Vec<f64> {
        let inner: Vec<f64> = product(&self.tensors[&format!("{name}.lora.0.weight")], x).into_iter().map(f).collect();
        product(&self.tensors[&format!("{name}.lora.2.weight")], &inner)
    }

    /// `sigmoid(up f(down x) + bias)`.
    fn share(&self, name: &str, x: &[f64], f: impl Fn(f64) -> f64) -> Vec<f64> {
        zip(&self.low_rank(name, x, f), &self.tensors[&format!("{name}.lora.2.bias")], |x, b| sigmoid(x + b))
    }

    /// Reads one token -> logits (vocab)
    ///
    /// # Panics
    /// If a tensor is missing, or the token is outside the vocabulary.
    pub fn step(&self, token: u32, memory: &mut [LayerMemory]) -> Vec<f64> {
        let hidden = self.config.hidden_size;
        let embedding = &self.tensors["model.embeddings.weight"][token as usize * hidden..][..hidden];
        let mut x = self.layer_norm("model.layers.0.pre_norm", embedding);
        let mut first_values = None;
        for (layer, memory) in memory.iter_mut().enumerate() {
            let name = format!("model.layers.{layer}");
            let input = self.layer_norm(&format!("{name}.attn_norm"), &x);
            let mixed = self.time_mix(&format!("{name}.attn"), &input, &mut first_values, memory);
            x = zip(&x, &mixed, |x, y| x + y);
            let input = self.layer_norm(&format!("{name}.ffn_norm"), &x);
            let mixed = self.channel_mix(&format!("{name}.ffn"), &input, memory);
            x = zip(&x, &mixed, |x, y| x + y);
        }
        product(&self.tensors["lm_head.weight"], &self.layer_norm("model.norm", &x))
    }

    /// x' = x + mu (previous input - x) for each of r, w, k, v, a and g. Then
    ///
    /// - r = W_r x'_r, k = W_k x'_k, v = W_v x'_v, g = G_2 sigmoid(G_1 x'_g)
    /// - w = exp(-e^(-1/2) sigmoid(D_2 tanh(D_1 x'_w) + d_0)): the share of each key that is kept
    /// - a = sigmoid(A_2 A_1 x'_a + a_0): the in-context learning rate
    /// - v <- v + (v of the first layer - v) sigmoid(V_2 V_1 x'_v + v_0), in all layers but the first
    ///
    /// and for each head
    ///
    /// - kappa = k k_k / |k k_k|, k <- k (1 + (a - 1) k_a)
    /// - S <- diag(w) S - (a kappa) (kappa^T S) + k v^T
    /// - y = norm(r^T S) + (sum r k r_k) v
    ///
    /// -> W_o (y g)
    fn time_mix(
        &self,
        name: &str,
        x: &[f64],
        first_values: &mut Option<Vec<f64>>,
        memory: &mut LayerMemory,
    ) -> Vec<f64> {
        let at = |part: &str| &self.tensors[&format!("{name}.{part}")];
        let map = |part: &str| format!("{name}.{part}_lora");
        let difference = zip(&memory.time_input, x, |before, x| before - x);
        let mixed = |part: &str| zip(x, &zip(&difference, at(&format!("x_{part}")), |d, mu| d * mu), |x, d| x + d);
        memory.time_input = x.to_vec();

        let r = product(at("r_proj.weight"), &mixed("r"));
        let k = product(at("k_proj.weight"), &mixed("k"));
        let mut v = product(at("v_proj.weight"), &mixed("v"));
        let g = self.low_rank(&map("g"), &mixed("g"), sigmoid);
        let a = self.share(&map("a"), &mixed("a"), |x| x);
        let decays = self.share(&map("w"), &mixed("w"), f64::tanh);
        let w: Vec<f64> = decays.into_iter().map(|share| (-(-0.5f64).exp() * share).exp()).collect();
        match first_values {
            None => *first_values = Some(v.clone()),
            Some(first) => {
                let share = self.share(&map("v"), &mixed("v"), |x| x);
                v = zip(&v, &zip(&zip(first, &v, |first, v| first - v), &share, |d, s| d * s), |v, d| v + d);
            }
        }
        let directions = zip(&k, at("k_k"), |k, weight| k * weight);
        let k = zip(&k, &zip(&a, at("k_a"), |a, weight| 1.0 + (a - 1.0) * weight), |k, scale| k * scale);

        let d = self.config.head_dim;
        let mut gated = Vec::with_capacity(x.len());
        for (head, s) in memory.s.chunks_exact_mut(d * d).enumerate() {
            let own = head * d..(head + 1) * d;
            let (r, w, k, v, a) = (&r[own.clone()], &w[own.clone()], &k[own.clone()], &v[own.clone()], &a[own.clone()]);
            let kappa = &directions[own.clone()];
            let length = dot(kappa, kappa).sqrt().max(1e-12);
            let kappa: Vec<f64> = kappa.iter().map(|v| v / length).collect();
            let removed: Vec<f64> = (0..d).map(|i| (0..d).map(|j| kappa[j] * s[j * d + i]).sum()).collect();
            for (j, row) in s.chunks_exact_mut(d).enumerate() {
                for (i, s) in row.iter_mut().enumerate() {
                    *s = w[j] * *s - a[j] * kappa[j] * removed[i] + k[j] * v[i];
                }
            }
            let y: Vec<f64> = (0..d).map(|i| (0..d).map(|j| r[j] * s[j * d + i]).sum()).collect();
            let normed = normalize(&y, self.config.rms_norm_eps * d as f64);
            let bonus: f64 = (0..d).map(|j| r[j] * k[j] * at("r_k")[own.start + j]).sum();
            for (i, (normed, v)) in own.zip(normed.iter().zip(v)) {
                gated.push((normed * at("g_norm.weight")[i] + at("g_norm.bias")[i] + bonus * v) * g[i]);
            }
        }
        product(at("o_proj.weight"), &gated)
    }

    /// W_v max(W_k x', 0)^2, with x' = x + mu (previous input - x).
    fn channel_mix(&self, name: &str, x: &[f64], memory: &mut LayerMemory) -> Vec<f64> {
        let at = |part: &str| &self.tensors[&format!("{name}.{part}")];
        let difference = zip(&memory.channel_input, x, |before, x| before - x);
        let mixed = zip(x, &zip(&difference, at("x_k"), |d, mu| d * mu), |x, d| x + d);
        memory.channel_input = x.to_vec();
        let keys: Vec<f64> = product(at("key.weight"), &mixed).into_iter().map(|k| k.max(0.0).powi(2)).collect();
        product(at("value.weight"), &keys)
    }
}
