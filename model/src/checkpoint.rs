//! A checkpoint folder as on the Hugging Face hub: `config.json` and `model.safetensors`, checked, then loaded.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device};

use crate::config::DecoderConfig;
use crate::decoder::Decoder;
pub use crate::weights::LoadError;
use crate::weights::Weights;

/// Reads and checks `config.json`.
fn load_config(folder: &Path) -> Result<DecoderConfig, LoadError> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|source| LoadError::Io { path, source })?;
    Ok(DecoderConfig::from_json(&text)?)
}

/// Loads a checkpoint folder; weights keep the dtype they are stored in (f32, f16 or bf16).
///
/// # Errors
/// [`LoadError`]; nothing is loaded unless every tensor is there, none is unknown, and all shapes fit.
pub fn load(folder: &Path, device: &Device) -> Result<Decoder, LoadError> {
    if !device.is_cpu() {
        return Err(LoadError::Device);
    }
    let config = load_config(folder)?;
    let path = folder.join("model.safetensors");
    if let Err(source) = std::fs::File::open(&path) {
        return Err(LoadError::Io { path, source });
    }
    // SAFETY: the file is read while it is mapped and not afterwards; a checkpoint is not written to while it is
    // loaded (a writer that truncated it would end this process, as it would any program that maps its files).
    let file = unsafe { MmapedSafetensors::new(&path)? };
    check(&config, &file)?;
    let weights = Weights::new(&file, device);
    Decoder::new(config, &weights)
}

/// The tensors that a config asks for, with their shapes: the contract between trainer and server.
pub fn tensors(config: &DecoderConfig) -> BTreeMap<String, Vec<usize>> {
    let (hidden, inner, width) = (config.hidden_size, config.inner_size(), config.intermediate_size);
    let (heads, d) = (config.num_attention_heads, config.head_dim);
    let mut all = BTreeMap::new();
    all.insert("model.embed_tokens.weight".to_owned(), vec![config.vocab_size, hidden]);
    all.insert("model.norm.weight".to_owned(), vec![hidden]);
    if !config.tie_word_embeddings {
        all.insert("lm_head.weight".to_owned(), vec![config.vocab_size, hidden]);
    }
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, shape: &[usize]| all.insert(format!("model.layers.{layer}.{name}"), shape.to_vec());
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for name in ["q", "k", "v"] {
            add(&format!("self_attn.{name}_proj.weight"), &[inner, hidden]);
            if config.conv_kernel > 0 {
                add(&format!("self_attn.{name}_conv1d.weight"), &[inner, 1, config.conv_kernel]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden, inner]);
        add("self_attn.sigma", &[heads, d]);
        add("self_attn.random_matrices", &[heads, config.proj_dim, d]);
        if config.gate {
            add("self_attn.gate.weight", &[heads, hidden]);
            add("self_attn.gate.bias", &[heads]);
        }
        if config.output_norm {
            add("self_attn.o_norm.weight", &[d]);
        }
        add("mlp.gate_proj.weight", &[width, hidden]);
        add("mlp.up_proj.weight", &[width, hidden]);
        add("mlp.down_proj.weight", &[hidden, width]);
    }
    all
}

/// Compares the file's header with what the config asks for; no tensor is read.
fn check(config: &DecoderConfig, file: &MmapedSafetensors) -> Result<(), LoadError> {
    let mut wanted = tensors(config);
    let mut problems = Vec::new();
    for (name, view) in file.tensors() {
        match wanted.remove(&name) {
            None => problems.push(format!("unknown tensor {name}")),
            Some(shape) if shape != view.shape() => {
                problems.push(format!("{name} has shape {:?}, expected {shape:?}", view.shape()));
            }
            Some(_) => {
                let dtype = DType::try_from(view.dtype()).ok();
                if !matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16)) {
                    problems.push(format!("{name} has dtype {:?}, expected F32, F16 or BF16", view.dtype()));
                }
            }
        }
    }
    problems.extend(wanted.keys().map(|name| format!("missing tensor {name}")));
    problems.sort();
    if problems.is_empty() { Ok(()) } else { Err(LoadError::Tensors(problems)) }
}
