//! Compares Mamba, RWKV-5 and RWKV-6 with references in f64 that read one token after another, as in the papers and the
//! authors' code. Only candle computes these families, so the references check candle independently.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;
use tidegate_model::candle::Checkpoint;
use tidegate_model::{Backend, DType, Device};

use crate::common::{Numbers, distance};
use crate::published;

/// A checkpoint, and the state of its layers by name.
struct Model {
    config: Value,
    tensors: HashMap<String, Vec<f64>>,
    state: HashMap<String, Vec<f64>>,
}

fn norm(x: &[f64], weight: &[f64], bias: Option<&[f64]>, groups: usize) -> Vec<f64> {
    let size = x.len() / groups;
    let one = |(i, x): (usize, &[f64])| -> Vec<f64> {
        // A layer norm if there is a bias, otherwise an RMSNorm.
        let mean = if bias.is_some() { x.iter().sum::<f64>() / size as f64 } else { 0.0 };
        let scale = (x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / size as f64 + 1e-5).sqrt();
        let at = |j: usize| (weight[i * size + j], bias.map_or(0.0, |bias| bias[i * size + j]));
        x.iter().enumerate().map(|(j, v)| (v - mean) / scale * at(j).0 + at(j).1).collect()
    };
    x.chunks_exact(size).enumerate().flat_map(one).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Returns `W x`.
fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// Returns `x W`, for a matrix with as many rows as `x` has numbers.
fn into(x: &[f64], w: &[f64]) -> Vec<f64> {
    let columns = w.len() / x.len();
    (0..columns).map(|j| x.iter().enumerate().map(|(i, x)| x * w[i * columns + j]).sum()).collect()
}

fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

impl Model {
    fn load(folder: &Path) -> Self {
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
        let wide = |tensor: tidegate_model::Tensor| {
            tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, wide(tensor))).collect();
        Self { config, tensors, state: HashMap::new() }
    }

    fn number(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn of(&self, name: &str) -> &[f64] {
        &self.tensors[name]
    }

    fn layer_norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        norm(x, self.of(&format!("{name}.weight")), Some(self.of(&format!("{name}.bias"))), 1)
    }

    /// Replaces the state with this name, and returns the previous one, or zeros if there is none.
    fn swap(&mut self, name: String, new: Vec<f64>) -> Vec<f64> {
        let zeros = vec![0.0; new.len()];
        self.state.insert(name, new).unwrap_or(zeros)
    }

    fn step(&mut self, id: u32) -> Vec<f64> {
        let (h, mamba) = (self.number("hidden_size"), self.config["model_type"] == "mamba");
        let embedding = if mamba { "backbone.embeddings.weight" } else { "rwkv.embeddings.weight" };
        let mut x = self.of(embedding)[id as usize * h..][..h].to_vec();
        if !mamba {
            x = self.layer_norm("rwkv.blocks.0.pre_ln", &x);
        }
        for i in 0..self.number("num_hidden_layers") {
            if mamba {
                x = zip(&x, &self.mamba(&format!("backbone.layers.{i}"), &x), |x, d| x + d);
            } else {
                let at = format!("rwkv.blocks.{i}");
                x = zip(&x, &self.time_mix(&at, &x), |x, d| x + d);
                x = zip(&x, &self.channel_mix(&at, &x), |x, d| x + d);
            }
        }
        if mamba {
            return times(self.of(embedding), &norm(&x, self.of("backbone.norm_f.weight"), None, 1));
        }
        times(self.of("head.weight"), &self.layer_norm("rwkv.ln_out", &x))
    }

    /// Gu and Dao, algorithm 2: h = exp(dt A) h + dt B x, y = C h + D x.
    fn mamba(&mut self, at: &str, x: &[f64]) -> Vec<f64> {
        const N: usize = 16;
        let own = |name: &str| format!("{at}.mixer.{name}");
        let x = norm(x, self.of(&format!("{at}.norm.weight")), None, 1);
        let both = times(self.of(&own("in_proj.weight")), &x);
        let (inner, rank) = (both.len() / 2, x.len().div_ceil(16));
        let (new, z) = both.split_at(inner);
        let mut inputs = [&self.state.get(at).cloned().unwrap_or(vec![0.0; 3 * inner])[..], new].concat();
        let (taps, bias) = (self.of(&own("conv1d.weight")), self.of(&own("conv1d.bias")));
        let conv = |c: usize| bias[c] + (0..4).map(|t| taps[c * 4 + t] * inputs[t * inner + c]).sum::<f64>();
        let x: Vec<f64> = (0..inner).map(conv).map(silu).collect();
        let selected = times(self.of(&own("x_proj.weight")), &x);
        let (b, c) = selected[rank..].split_at(N);
        let dt = times(self.of(&own("dt_proj.weight")), &selected[..rank]);
        let dt = zip(&dt, self.of(&own("dt_proj.bias")), |dt, bias| (dt + bias).exp().ln_1p());
        let old = self.swap(format!("{at}.h"), vec![0.0; inner * N]);
        let a = self.of(&own("A_log"));
        let step = |i: usize| (dt[i / N] * -a[i].exp()).exp() * old[i] + dt[i / N] * b[i % N] * x[i / N];
        let new: Vec<f64> = (0..inner * N).map(step).collect();
        let y: Vec<f64> = new.chunks_exact(N).map(|h| h.iter().zip(c).map(|(h, c)| h * c).sum()).collect();
        let y = zip(&y, &zip(&x, self.of(&own("D")), |x, d| x * d), |y, d| y + d);
        self.state.insert(format!("{at}.h"), new);
        self.state.insert(at.to_owned(), inputs.split_off(inner));
        times(self.of(&own("out_proj.weight")), &zip(&y, z, |y, z| y * silu(z)))
    }

    /// The author's `RWKV_Tmix_x052` and `RWKV_Tmix_x060`: S = diag(w) S + k v^T, read with the bonus u for the newest.
    fn time_mix(&mut self, at: &str, x: &[f64]) -> Vec<f64> {
        let x = self.layer_norm(&format!("{at}.ln1"), x);
        let last = self.swap(format!("{at}.time"), x.clone());
        let own = |name: &str| format!("{at}.attention.{name}");
        let (h, size) = (x.len(), self.number("head_size"));
        let shifted = |share: &[f64]| zip(&x, &zip(&zip(&last, &x, |l, x| l - x), share, |s, m| s * m), |x, s| x + s);
        let [w, k, v, r, g] = if self.config["model_type"] == "rwkv5" {
            // In RWKV-5, a stored share is that of the newest token.
            let mixed = |name: &str| {
                let share: Vec<f64> = self.of(&own(&format!("time_mix_{name}"))).iter().map(|m| 1.0 - m).collect();
                shifted(&share)
            };
            let decay = self.of(&own("time_decay")).to_vec();
            [decay, mixed("key"), mixed("value"), mixed("receptance"), mixed("gate")]
        } else {
            let heads = h / size;
            let inner = into(&shifted(self.of(&own("time_maa_x"))), self.of(&own("time_maa_w1")));
            let inner: Vec<f64> = inner.into_iter().map(f64::tanh).collect();
            let mixed = |(i, name): (usize, &str)| {
                let part =
                    into(&inner[i * heads..][..heads], &self.of(&own("time_maa_w2"))[i * heads * h..][..heads * h]);
                shifted(&zip(self.of(&own(&format!("time_maa_{name}"))), &part, |m, p| m + p))
            };
            let mut all: [Vec<f64>; 5] = [(0, "w"), (1, "k"), (2, "v"), (3, "r"), (4, "g")].map(mixed);
            let low: Vec<f64> = into(&all[0], self.of(&own("time_decay_w1"))).into_iter().map(f64::tanh).collect();
            let decay = into(&low, self.of(&own("time_decay_w2")));
            all[0] = zip(self.of(&own("time_decay")), &decay, |a, b| a + b);
            all
        };
        let through = |name: &str, x: &[f64]| times(self.of(&own(&format!("{name}.weight"))), x);
        let (k, v, r, g) = (through("key", &k), through("value", &v), through("receptance", &r), through("gate", &g));
        let w: Vec<f64> = w.iter().map(|w| (-w.exp()).exp()).collect();
        let u = self.of(&own("time_faaaa")).to_vec();
        let (mut out, name) = (vec![0.0; h], format!("{at}.s"));
        let mut s = self.state.remove(&name).unwrap_or(vec![0.0; h * size]);
        for i in 0..h {
            for j in 0..size {
                let (s, at) = (&mut s[i * size + j], i / size * size + j);
                out[at] += r[i] * (*s + u[i] * k[i] * v[at]);
                *s = w[i] * *s + k[i] * v[at];
            }
        }
        self.state.insert(name, s);
        // Divide by `head_size_divisor`, which is 8.
        let out: Vec<f64> = out.iter().map(|o| o / 8.0).collect();
        let out = norm(&out, self.of(&own("ln_x.weight")), Some(self.of(&own("ln_x.bias"))), h / size);
        times(self.of(&own("output.weight")), &zip(&out, &g, |o, g| o * silu(g)))
    }

    fn channel_mix(&mut self, at: &str, x: &[f64]) -> Vec<f64> {
        let x = self.layer_norm(&format!("{at}.ln2"), x);
        let last = self.swap(format!("{at}.channel"), x.clone());
        let own = |name: &str| self.of(&format!("{at}.feed_forward.{name}"));
        let v5 = self.config["model_type"] == "rwkv5";
        let mixed = |share: &[f64]| {
            let share = share.iter().map(|m| if v5 { 1.0 - m } else { *m });
            x.iter().zip(&last).zip(share).map(|((x, l), m)| x + (l - x) * m).collect::<Vec<_>>()
        };
        let [k, r] = if v5 { ["time_mix_key", "time_mix_receptance"] } else { ["time_maa_k", "time_maa_r"] };
        let k: Vec<f64> = times(own("key.weight"), &mixed(own(k))).iter().map(|k| k.max(0.0).powi(2)).collect();
        let r = times(own("receptance.weight"), &mixed(own(r)));
        zip(&r, &times(own("value.weight"), &k), |r, v| sigmoid(r) * v)
    }
}

#[test]
fn the_families_that_only_candle_has_are_those_of_their_papers() {
    // RecurrentGemma is compared with golden numbers in `recurrent_gemma.rs`.
    for (seed, kind) in (60..).zip(published::FAMILIES).filter(|(_, kind)| *kind != "recurrent_gemma") {
        let folder = published::written(kind, 61, 64, seed);
        let (mut model, decoder) = (Model::load(folder.path()), Checkpoint::open(folder.path()).unwrap());
        let decoder = decoder.decoder(&Device::Cpu).unwrap();
        let (mut pool, mut found) = (decoder.new_pool(1, 1).unwrap(), Vec::new());
        for (i, id) in Numbers::new(seed).ids(200, 61).into_iter().enumerate() {
            decoder.decode_into(&[id], &mut pool, &[0], &mut found).unwrap();
            let want: Vec<f32> = model.step(id).iter().map(|&v| v as f32).collect();
            let error = distance(&found, &want);
            assert!(error < 1e-4, "{kind}: token {i}: {error}");
        }
    }
}
