//! Helpers that tests of golden numbers and references share: fixtures, tensors in f64, and comparisons.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use tidegate_model::checkpoint::Stored;
use tidegate_model::{DType, DecoderConfig, Device, StatePool, Tensor};

use crate::common::{distance, flat};

const TOLERANCE: f32 = 1e-4;

pub(crate) fn fixture(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder)
}

/// Returns the logits and states that another implementation computed, by name, and the tokens that it read.
pub(crate) fn golden(folder: &str) -> (HashMap<String, Tensor>, Vec<u32>) {
    let golden: HashMap<String, Tensor> =
        candle_core::safetensors::load(fixture(folder).join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = flat(&golden["ids"].to_dtype(DType::F32).unwrap()).iter().map(|&id| id as u32).collect();
    (golden, ids)
}

/// Returns the config of a checkpoint and its tensors in f64. If the output head is tied, it is a copy of the tensor
/// named `embeddings`.
pub(crate) fn wide(folder: &Path, embeddings: &str) -> (DecoderConfig, BTreeMap<String, Vec<f64>>) {
    let stored = Stored::open(folder).unwrap();
    let numbers = |name: &str| stored.floats(name).unwrap().into_iter().map(f64::from).collect::<Vec<_>>();
    let mut tensors: BTreeMap<String, _> =
        stored.tensors().map(|tensor| (tensor.name.to_string(), numbers(tensor.name))).collect();
    let embeddings = tensors[embeddings].clone();
    tensors.entry("lm_head.weight".into()).or_insert(embeddings);
    (stored.config().clone(), tensors)
}

/// Returns one layer of a slot's state: S, and the past inputs that the layer keeps.
pub(crate) fn layer(pool: &StatePool, layer: usize, slot: usize) -> (Vec<f32>, Vec<f32>) {
    let (memory, inputs) = pool.layer(layer, slot).unwrap();
    (flat(&memory), flat(&inputs.unwrap()))
}

pub(crate) fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&v| v as f32).collect()
}

pub(crate) fn close(got: &[f32], want: &[f32], what: &str) {
    let error = distance(got, want);
    assert!(error < TOLERANCE, "{what}: {error}");
}
