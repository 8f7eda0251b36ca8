//! Tests that the errors of small models do not grow over a million tokens: states and logits are compared with
//! references in f64. Run with `cargo test -p tidegate-model --test decoder million -- --ignored --nocapture`.

use std::collections::BTreeMap;
use std::path::Path;

use tidegate_model::mixers::rfa::naive;
use tidegate_model::mixers::{mamba2, rwkv7};
use tidegate_model::{DecoderConfig, Device, PoolOptions, StatePool, StateType, checkpoint};

use crate::common::{Numbers, config, flat, write_checkpoint};
use crate::reference::wide;
use crate::table::MIXERS;

/// Number of tokens between two comparisons.
const TOKENS: usize = 1000;
const COMPARISONS: usize = 1000;

/// A whole model in f64, with its state.
trait Reference {
    /// Reads one token, and returns the logits.
    fn step(&mut self, id: u32) -> Vec<f64>;

    /// Returns the state, in the order of a slot's state.
    fn state(&self) -> Vec<f64>;
}

impl Reference for (rwkv7::naive::Model, Vec<rwkv7::naive::LayerMemory>) {
    fn step(&mut self, id: u32) -> Vec<f64> {
        self.0.step(id, &mut self.1)
    }

    fn state(&self) -> Vec<f64> {
        self.1.iter().flat_map(|layer| [&*layer.s, &layer.time_input, &layer.channel_input].concat()).collect()
    }
}

impl Reference for (mamba2::naive::Model, Vec<mamba2::naive::LayerMemory>) {
    fn step(&mut self, id: u32) -> Vec<f64> {
        self.0.step(id, &mut self.1)
    }

    fn state(&self) -> Vec<f64> {
        self.1.iter().flat_map(|layer| [&*layer.s, &layer.inputs].concat()).collect()
    }
}

/// RFA-Gate with sines and cosines as features, without a convolution, positions or an output norm.
struct RfaGate {
    config: DecoderConfig,
    tensors: BTreeMap<String, Vec<f64>>,
    heads: Vec<naive::Memory<f64>>, // (layers, heads)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl RfaGate {
    fn new(folder: &Path) -> Self {
        let (config, tensors) = wide(folder, "model.embed_tokens.weight");
        let memory = naive::Memory::new(config.features(), config.head_dim);
        Self { heads: vec![memory; config.num_hidden_layers * config.num_attention_heads], config, tensors }
    }

    /// Returns `W x`.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.tensors[&format!("{name}.weight")].chunks_exact(x.len()).map(|row| dot(row, x)).collect()
    }

    /// Returns `x / sqrt(mean(x^2) + eps) weight`.
    fn normed(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + self.config.rms_norm_eps).sqrt();
        x.iter().zip(&self.tensors[&format!("{name}.weight")]).map(|(x, w)| x * scale * w).collect()
    }

    /// Returns `W_o h`. x: (hidden)
    fn attention(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let name = format!("model.layers.{layer}.self_attn");
        let (heads, d, eps) = (self.config.num_attention_heads, self.config.head_dim, self.config.denominator_eps);
        let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|part| self.linear(&format!("{name}.{part}"), x));
        let gate = self.linear(&format!("{name}.gate"), x);
        let mut h = Vec::with_capacity(heads * d);
        for head in 0..heads {
            let of = |x: &[f64]| x[head * d..][..d].to_vec();
            let sigma = of(&self.tensors[&format!("{name}.sigma")]);
            let rows = self.config.proj_dim * d;
            let w = &self.tensors[&format!("{name}.random_matrices")][head * rows..][..rows];
            let w: Vec<f64> = w.iter().enumerate().map(|(at, w)| w * sigma[at % d]).collect();
            let phi = |x: &[f64]| naive::gaussian_features(&of(x), &w);
            let gate = gate[head] + self.tensors[&format!("{name}.gate.bias")][head];
            h.extend(naive::step(&mut self.heads[layer * heads + head], &phi(&q), &phi(&k), &of(&v), Some(gate), eps));
        }
        self.linear(&format!("{name}.o_proj"), &h)
    }
}

impl Reference for RfaGate {
    fn step(&mut self, id: u32) -> Vec<f64> {
        let hidden = self.config.hidden_size;
        let mut x = self.tensors["model.embed_tokens.weight"][id as usize * hidden..][..hidden].to_vec();
        for layer in 0..self.config.num_hidden_layers {
            let name = format!("model.layers.{layer}");
            let mixed = self.attention(layer, &self.normed(&format!("{name}.input_layernorm"), &x));
            x.iter_mut().zip(mixed).for_each(|(x, mixed)| *x += mixed);
            let normed = self.normed(&format!("{name}.post_attention_layernorm"), &x);
            let [gate, up] = ["gate", "up"].map(|part| self.linear(&format!("{name}.mlp.{part}_proj"), &normed));
            let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
            x.iter_mut().zip(self.linear(&format!("{name}.mlp.down_proj"), &inner)).for_each(|(x, out)| *x += out);
        }
        self.linear("lm_head", &self.normed("model.norm", &x))
    }

    fn state(&self) -> Vec<f64> {
        self.heads.iter().flat_map(|head| [&*head.s, &head.z, &[head.c]].concat()).collect()
    }
}

fn state(pool: &StatePool, layers: usize) -> Vec<f32> {
    let layer = |layer| {
        let (memory, inputs) = pool.layer(layer, 0).unwrap();
        [flat(&memory), inputs.map_or_else(Vec::new, |inputs| flat(&inputs))].concat()
    };
    (0..layers).flat_map(layer).collect()
}

/// Returns the root mean square of the errors, relative to that of the expected numbers.
fn error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = got.iter().zip(want).map(|(&got, want)| (f64::from(got) - want).powi(2));
    (squares.sum::<f64>() / dot(want, want)).sqrt()
}

/// A pool, and its errors at each comparison.
struct Run {
    pool: StatePool,
    states: Vec<f64>,
    logits: Vec<f64>,
}

/// Reads a million random tokens with a small model, with states of both types, and with its reference. `most` bounds
/// the errors in f32 and bf16: at least twice the largest measured errors.
fn do_not_drift(name: &str, keys: &str, new: impl FnOnce(&Path) -> Box<dyn Reference>, most: [f64; 2]) {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config(keys), 41);
    let (mut reference, decoder) = (new(folder.path()), checkpoint::load(folder.path(), &Device::Cpu).unwrap());
    let types = [StateType::F32, StateType::Bf16];
    let mut runs = types.map(|state| {
        let pool = decoder.new_pool_with(PoolOptions { state, ..PoolOptions::new(1) }).unwrap();
        Run { pool, states: Vec::new(), logits: Vec::new() }
    });
    let mut numbers = Numbers::new(41);
    for _ in 0..COMPARISONS {
        let ids = numbers.ids(TOKENS, 61);
        let want = ids.iter().map(|&id| reference.step(id)).last().unwrap();
        for run in &mut runs {
            let logits = decoder.prefill_logits(&ids, &mut run.pool, 0).unwrap();
            run.logits.push(error(&logits, &want));
            run.states.push(error(&state(&run.pool, decoder.config().num_hidden_layers), &reference.state()));
        }
    }
    for ((run, of), most) in runs.iter().zip(types).zip(most) {
        assert_eq!(run.pool.tokens(0), (TOKENS * COMPARISONS) as u64);
        for (what, errors) in [("states", &run.states), ("logits", &run.logits)] {
            let tenth = COMPARISONS / 10;
            let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
            let (first, last) = (mean(&errors[..tenth]), mean(&errors[COMPARISONS - tenth..]));
            let greatest = errors.iter().copied().fold(0.0, f64::max);
            println!(
                "{name}, states in {of:?}: relative error of {what} {first:.1e} in the first tenth, {last:.1e} in the last, \
                 {greatest:.1e} at most"
            );
            assert!(greatest < most, "{name}: {greatest}");
            assert!(last < 1.5 * first, "{name}: the error grows from {first} to {last}");
        }
    }
}

#[test]
#[ignore = "takes minutes"]
fn a_million_tokens_do_not_drift_in_rfa_gate() {
    do_not_drift("RFA-Gate", MIXERS[0].configs[0], |folder| Box::new(RfaGate::new(folder)), [2e-5, 0.05]);
}

#[test]
#[ignore = "takes minutes"]
fn a_million_tokens_do_not_drift_in_rwkv7() {
    let new = |folder: &Path| -> Box<dyn Reference> {
        let (config, tensors) = wide(folder, "model.embeddings.weight");
        let model = rwkv7::naive::Model { config, tensors };
        let memory = model.new_memory();
        Box::new((model, memory))
    };
    do_not_drift("RWKV-7", MIXERS[3].configs[0], new, [2e-5, 0.06]);
}

#[test]
#[ignore = "takes minutes"]
fn a_million_tokens_do_not_drift_in_mamba2() {
    let new = |folder: &Path| -> Box<dyn Reference> {
        let (config, tensors) = wide(folder, "backbone.embeddings.weight");
        let model = mamba2::naive::Model { config, tensors };
        let memory = model.new_memory();
        Box::new((model, memory))
    };
    do_not_drift("Mamba-2", MIXERS[4].configs[0], new, [2e-5, 0.03]);
}
