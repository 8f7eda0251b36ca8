//! Checkpoints with random weights and the tokenizer of the pinned one.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::Value;
use tempfile::TempDir;
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, checkpoint};

/// A checkpoint with random weights, and these configuration keys in addition to the pinned ones.
pub(crate) fn written(keys: &Value) -> TempDir {
    written_about(0.2, keys)
}

/// The same, with weights around `mean`. Around 0, each text has its own likeliest continuation.
pub(crate) fn written_about(mean: f32, keys: &Value) -> TempDir {
    let (folder, pinned) =
        (TempDir::new().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny"));
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(pinned.join(name), folder.path().join(name)).unwrap();
    }
    let config = serde_json::from_slice(&std::fs::read(pinned.join("config.json")).unwrap()).unwrap();
    let config = super::with(config, keys.clone()).to_string();
    std::fs::write(folder.path().join("config.json"), &config).unwrap();
    let mut normals = Normals::new(5);
    let tensors: Vec<_> = checkpoint::tensors(&DecoderConfig::from_json(&config).unwrap())
        .into_iter()
        .map(|(name, shape)| {
            let number = |_| (0.4 * normals.normal() as f32 + mean).to_le_bytes();
            let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(number).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    serialize_to_file(views, None, &folder.path().join(checkpoint::SAFETENSORS)).unwrap();
    folder
}
