//! RWKV-7 as its author publishes it, in one file without a config: the tensors have the names of the `rwkv` package,
//! the low-rank matrices are transposed, and the sizes follow from the shapes.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::MODEL_TYPE;
use crate::mixers::names::{Names, TensorNames};
use crate::weights::{Entry, Reading};

/// The tensor names in these files.
pub(crate) static NAMES: TensorNames = TensorNames {
    tensors: &[
        ("model.embeddings.weight", "emb.weight"),
        ("model.layers.0.pre_norm.weight", "blocks.0.ln0.weight"),
        ("model.layers.0.pre_norm.bias", "blocks.0.ln0.bias"),
        ("model.norm.weight", "ln_out.weight"),
        ("model.norm.bias", "ln_out.bias"),
        ("lm_head.weight", "head.weight"),
    ],
    layer: ("model.layers.", "blocks."),
    layers: LAYERS,
    readings: &[("_lora.lora.0.weight", Reading::Transposed), ("_lora.lora.2.weight", Reading::Transposed)],
    // The first layer has no earlier values to mix in.
    unused: &["blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"],
};

const LAYERS: Names = &[
    ("attn_norm.weight", "ln1.weight"),
    ("attn_norm.bias", "ln1.bias"),
    ("attn.x_r", "att.x_r"),
    ("attn.x_w", "att.x_w"),
    ("attn.x_k", "att.x_k"),
    ("attn.x_v", "att.x_v"),
    ("attn.x_a", "att.x_a"),
    ("attn.x_g", "att.x_g"),
    ("attn.r_proj.weight", "att.receptance.weight"),
    ("attn.k_proj.weight", "att.key.weight"),
    ("attn.v_proj.weight", "att.value.weight"),
    ("attn.o_proj.weight", "att.output.weight"),
    ("attn.w_lora.lora.0.weight", "att.w1"),
    ("attn.w_lora.lora.2.weight", "att.w2"),
    ("attn.w_lora.lora.2.bias", "att.w0"),
    ("attn.a_lora.lora.0.weight", "att.a1"),
    ("attn.a_lora.lora.2.weight", "att.a2"),
    ("attn.a_lora.lora.2.bias", "att.a0"),
    ("attn.v_lora.lora.0.weight", "att.v1"),
    ("attn.v_lora.lora.2.weight", "att.v2"),
    ("attn.v_lora.lora.2.bias", "att.v0"),
    ("attn.g_lora.lora.0.weight", "att.g1"),
    ("attn.g_lora.lora.2.weight", "att.g2"),
    ("attn.k_k", "att.k_k"),
    ("attn.k_a", "att.k_a"),
    ("attn.r_k", "att.r_k"),
    ("attn.g_norm.weight", "att.ln_x.weight"),
    ("attn.g_norm.bias", "att.ln_x.bias"),
    ("ffn_norm.weight", "ln2.weight"),
    ("ffn_norm.bias", "ln2.bias"),
    ("ffn.x_k", "ffn.x_k"),
    ("ffn.key.weight", "ffn.key.weight"),
    ("ffn.value.weight", "ffn.value.weight"),
];

/// Config keys, each with the tensor and the dimension that gives its value.
const SIZES: [(&str, &str, usize); 8] = [
    ("vocab_size", "emb.weight", 0),
    ("hidden_size", "emb.weight", 1),
    ("intermediate_size", "blocks.0.ffn.key.weight", 0),
    ("head_dim", "blocks.0.att.r_k", 1),
    ("decay_low_rank_dim", "blocks.0.att.w1", 1),
    ("a_low_rank_dim", "blocks.0.att.a1", 1),
    ("v_low_rank_dim", "blocks.1.att.v1", 1),
    ("gate_low_rank_dim", "blocks.0.att.g1", 1),
];

/// Builds the text of a `config.json` for a file with these tensors.
///
/// # Errors
/// The reasons why the tensors do not determine a config.
pub(crate) fn config(entries: &BTreeMap<String, Entry>) -> Result<String, Vec<String>> {
    let (mut config, mut problems) = (Map::new(), Vec::new());
    let number = |name: &String| name.strip_prefix("blocks.")?.split_once('.')?.0.parse::<usize>().ok();
    let layers = entries.keys().filter_map(number).max().map_or(0, |last| last.saturating_add(1));
    for (key, name, dimension) in SIZES {
        match entries.get(name).map(|entry| (entry.shape.get(dimension), &entry.shape)) {
            // In a model with one layer, no layer mixes in the first layer's values.
            None if name.starts_with("blocks.1.") && layers < 2 => drop(config.insert(key.into(), json!(1))),
            None => problems.push(format!("missing tensor {name}")),
            Some((Some(size), shape)) if shape.len() == 2 => drop(config.insert(key.into(), json!(size))),
            Some((_, shape)) => problems.push(format!("{name} has shape {shape:?}, expected two dimensions")),
        }
    }
    problems.dedup();
    if !problems.is_empty() {
        return Err(problems);
    }
    // In all of these models, token 0 both starts and ends a text.
    for (key, value) in [
        ("model_type", json!(MODEL_TYPE)),
        ("num_hidden_layers", json!(layers)),
        ("bos_token_id", json!(0)),
        ("eos_token_id", json!(0)),
    ] {
        config.insert(key.into(), value);
    }
    Ok(Value::Object(config).to_string())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::NAMES;

    #[test]
    fn every_tensor_has_one_name_in_files() {
        let text = r#"{"model_type": "rwkv7", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
            "num_hidden_layers": 2, "decay_low_rank_dim": 4, "a_low_rank_dim": 4, "v_low_rank_dim": 4,
            "gate_low_rank_dim": 4}"#;
        let config = crate::DecoderConfig::from_json(text).unwrap();
        let ours: Vec<String> = crate::checkpoint::tensors(&config).into_keys().collect();
        let theirs: BTreeSet<String> = ours.iter().map(|name| NAMES.theirs(name)).collect();
        assert!(theirs.iter().all(|name| !name.contains("model") && name != "lm_head.weight"), "{theirs:?}");
        assert_eq!(theirs.len(), ours.len());
    }
}
