//! Helpers that the model's integration tests share: a simple random number generator, tensors from it, and tiny
//! checkpoints on disk.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};

use tidegate_model::checkpoint;
use tidegate_model::{Decoder, DecoderConfig, Device, Tensor};

/// A seeded generator of numbers, about uniform in [-1, 1).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1))
    }

    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns a number of an approximately normal distribution: the sum of twelve uniform numbers has variance 4.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.next()).sum::<f32>() / 2.0
    }

    pub fn vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }

    pub fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }

    pub fn ids(&mut self, len: usize, vocab: usize) -> Vec<u32> {
        (0..len).map(|_| (f32::midpoint(self.next(), 1.0) * vocab as f32) as u32 % vocab as u32).collect()
    }
}

/// Returns a small decoder's config. `extra` adds or replaces JSON keys, each with a comma before it.
pub fn config(extra: &str) -> DecoderConfig {
    let mut config = serde_json::json!({"model_type": "rfa_gate", "vocab_size": 61, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "proj_dim": 12});
    let keys: serde_json::Value = serde_json::from_str(&format!("{{{}}}", extra.trim_start_matches(','))).unwrap();
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    DecoderConfig::from_json(&config.to_string()).unwrap()
}

/// Writes a checkpoint of random weights. No tensor is all zeros or all ones.
pub fn write_checkpoint(folder: &Path, config: &DecoderConfig, seed: u64) {
    std::fs::write(folder.join("config.json"), serde_json::to_string(config).unwrap()).unwrap();
    let mut numbers = Numbers::new(seed);
    let tensors = checkpoint::tensors(config).into_iter().map(|(name, shape)| {
        let len = shape.iter().product();
        let fan_in = *shape.last().unwrap() as f32;
        let values: Vec<f32> = match name.as_str() {
            n if n.ends_with("norm.weight") || n.ends_with("norm_f.weight") => {
                numbers.vec(len).iter().map(|v| 1.0 + 0.3 * v).collect()
            }
            n if n.ends_with("sigma") => numbers.vec(len).iter().map(|v| 0.9 + 0.3 * v).collect(),
            n if n.ends_with("gate.bias") => numbers.vec(len).iter().map(|v| 2.0 + 2.0 * v).collect(),
            // Decays with half-lives from one token to a few dozen.
            n if n.ends_with("w_lora.lora.2.bias") => numbers.vec(len).iter().map(|v| -2.0 + 3.0 * v).collect(),
            // Mamba-2: time steps of about 0.1 to 2, and half-lives from less than one token to a few dozen.
            n if n.ends_with("A_log") => numbers.vec(len),
            n if n.ends_with("dt_bias") => numbers.vec(len).iter().map(|v| -1.5 + 1.5 * v).collect(),
            n if n.ends_with("mixer.D") => numbers.vec(len).iter().map(|v| 1.0 + 0.5 * v).collect(),
            n if n.ends_with("conv1d.bias") => numbers.vec(len).iter().map(|v| 0.3 * v).collect(),
            n if n.ends_with("random_matrices") => numbers.normals(len),
            _ => numbers.normals(len).iter().map(|v| v / fan_in.sqrt()).collect(),
        };
        (name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&tensors.collect(), folder.join("model.safetensors")).unwrap();
}

/// Returns a decoder with [`config`] and random weights.
pub fn decoder(extra: &str, seed: u64) -> Decoder {
    written(&config(extra), seed)
}

/// Returns a decoder with this config and random weights, loaded from a checkpoint.
pub fn written(config: &DecoderConfig, seed: u64) -> Decoder {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), config, seed);
    checkpoint::load(folder.path(), &Device::Cpu).unwrap()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

pub fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Returns ids as a tensor of one row: (1, time).
pub fn row(ids: &[u32]) -> Tensor {
    Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap()
}

/// Returns the largest difference between two slices.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}
