//! Checkpoints with random weights, with the tokenizer of the pinned checkpoint or with an RWKV vocabulary.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, checkpoint};

/// Writes a checkpoint with random weights and the pinned configuration, to which it adds `keys`.
pub(crate) fn written(keys: &Value) -> TempDir {
    written_about(0.2, keys)
}

/// Like [`written`], with weights around `mean`. With a mean of 0, different texts have different likeliest
/// continuations.
pub(crate) fn written_about(mean: f32, keys: &Value) -> TempDir {
    let (folder, pinned) =
        (TempDir::new().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny"));
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(pinned.join(name), folder.path().join(name)).unwrap();
    }
    // There is no repetition penalty, so that a temperature of 0 chooses the likeliest token.
    let sampling = json!({"bos_token_id": 0, "eos_token_id": 0, "temperature": 0.8, "top_p": 0.95});
    std::fs::write(folder.path().join("generation_config.json"), sampling.to_string()).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(pinned.join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    write_weights(folder.path(), &config.to_string(), mean);
    folder
}

/// Writes an RWKV-7 checkpoint with random weights. Its vocabulary is all single bytes, [`WORDS`], and a part of a
/// character.
pub(crate) fn written_rwkv7() -> TempDir {
    let folder = TempDir::new().unwrap();
    write_vocabulary(folder.path());
    let config = json!({
        "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "vocab_size": 272, "hidden_size": 64,
        "num_hidden_layers": 2, "head_dim": 32, "num_heads": 2, "intermediate_size": 96, "decay_low_rank_dim": 8,
        "a_low_rank_dim": 8, "v_low_rank_dim": 4, "gate_low_rank_dim": 8, "hidden_act": "sqrelu", "norm_eps": 1e-5,
        "attn": null, "norm_bias": true, "norm_first": true, "tie_word_embeddings": false, "bos_token_id": 1,
        "eos_token_id": 2,
    });
    write_weights(folder.path(), &config.to_string(), 0.0);
    folder
}

/// Writes a vocabulary file of 265 tokens, with ids from 1.
pub(crate) fn write_vocabulary(folder: &Path) {
    let bytes = (0..=u8::MAX).map(|byte| (format!("b'\\x{byte:02x}'"), 1));
    let words = WORDS.iter().map(|word| (format!("'{}'", word.replace('\n', "\\n")), word.len()));
    let part = (r"b'\xe2\x98'".to_owned(), 2);
    let lines = (1..).zip(bytes.chain(words).chain([part]));
    let lines: Vec<String> = lines.map(|(id, (token, length))| format!("{id} {token} {length}\n")).collect();
    std::fs::write(folder.join("rwkv_vocab_v20230424.txt"), lines.concat()).unwrap();
}

/// Tokens of several bytes, with ids from 257.
pub(crate) const WORDS: [&str; 8] = ["\n\n", "User", "Assistant", "System", " the", " river", " fox", " said"];

/// Writes a configuration and random weights around `mean`.
fn write_weights(folder: &Path, config: &str, mean: f32) {
    std::fs::write(folder.join("config.json"), config).unwrap();
    let mut normals = Normals::new(5);
    let tensors: Vec<_> = checkpoint::tensors(&DecoderConfig::from_json(config).unwrap())
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
    serialize_to_file(views, None, &folder.join(checkpoint::SAFETENSORS)).unwrap();
}
