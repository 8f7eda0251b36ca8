//! What the tests share: the fixture, a random encoder-decoder with its tokenizer, and the binary.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::Tensor;
use serde_json::{Value, json};
use tidegate_model::checkpoint::tensors;
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, Device};

/// Returns the folder of a tiny decoder whose tokenizer has 300 tokens.
pub(crate) fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny")
}

/// Every token id divisible by this ends a translation of [`seq2seq`].
pub(crate) const ENDS: usize = 6;
/// Maximum tokens of a source of [`seq2seq`].
pub(crate) const MOST: usize = 24;

/// Writes a checkpoint folder of an encoder-decoder whose config is changed by `keys`. One token in six ends a
/// translation, and embeddings are large enough to avoid repeated tokens, so there are long and short translations.
pub(crate) fn seq2seq(keys: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut config = json!({
        "model_type": "rfa_seq2seq", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "proj_dim": 8, "position_embedding": "rope",
        "encoder_layers": 3, "max_source_positions": MOST, "decoder_start_token_id": 0,
        "eos_token_id": (0..300).step_by(ENDS).collect::<Vec<u32>>(),
    });
    keys.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    let config = DecoderConfig::from_json(&config.to_string()).unwrap();
    std::fs::write(folder.path().join("config.json"), serde_json::to_string(&config).unwrap()).unwrap();
    std::fs::copy(fixture().join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let mut normals = Normals::new(5);
    let tensors = tensors(&config).into_iter().map(|(name, shape)| {
        let (mean, scale) = match name.as_str() {
            n if n.ends_with("norm.weight") => (1.0, 0.2),
            n if n.ends_with("sigma") => (0.8, 0.2),
            n if n.ends_with("gate.bias") => (2.0, 1.0),
            n if n.ends_with("random_matrices") => (0.0, 1.0),
            "model.embed_tokens.weight" => (0.0, 1.5),
            n if n.ends_with("cross_attn.o_proj.weight") => (0.0, 2.5 / (shape[1] as f64).sqrt()),
            _ => (0.0, 1.0 / (shape[shape.len() - 1] as f64).sqrt()),
        };
        let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| (mean + scale * normals.normal()) as f32).collect();
        (name, Tensor::from_vec(numbers, shape, &Device::Cpu).unwrap())
    });
    candle_core::safetensors::save(&tensors.collect(), folder.path().join("model.safetensors")).unwrap();
    folder
}

/// Returns the config keys of the softmax twin.
pub(crate) fn softmax() -> Value {
    json!({"attention": "softmax", "sliding_window": 20})
}

/// Runs the binary.
pub(crate) fn weights(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate-weights"))
        .args(arguments)
        .env_remove("TIDEGATE_MODEL")
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap()
}
