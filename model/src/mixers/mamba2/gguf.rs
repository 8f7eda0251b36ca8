//! Mamba-2 in GGUF files as llama.cpp writes them. A itself is stored, not its logarithm. The files have no limits on
//! time steps, which llama.cpp does not support, and their projections have no biases.

use serde_json::{Map, Value, json};

use super::published::MODEL_TYPE;
use crate::mixers::gguf::GgufFamily;
use crate::mixers::names::TensorNames;
use crate::weights::Reading;

/// The tables of the family for GGUF files.
pub(in crate::mixers) const GGUF: GgufFamily = GgufFamily {
    architecture: MODEL_TYPE,
    numbers: &[
        ("hidden_size", "embedding_length"),
        ("num_hidden_layers", "block_count"),
        ("conv_kernel", "ssm.conv_kernel"),
        ("intermediate_size", "ssm.inner_size"),
        ("num_attention_heads", "ssm.time_step_rank"),
        ("state_size", "ssm.state_size"),
        ("n_groups", "ssm.group_count"),
    ],
    floats: &[("rms_norm_eps", "attention.layer_norm_rms_epsilon")],
    names: NAMES,
    may_be_tied: Some("output.weight"),
    derive,
};

const NAMES: TensorNames = TensorNames {
    tensors: &[
        ("backbone.embeddings.weight", "token_embd.weight"),
        ("backbone.norm_f.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ],
    layer: ("backbone.layers.", "blk."),
    layers: &[
        ("norm.weight", "attn_norm.weight"),
        ("mixer.in_proj.weight", "ssm_in.weight"),
        ("mixer.conv1d.weight", "ssm_conv1d.weight"),
        ("mixer.conv1d.bias", "ssm_conv1d.bias"),
        ("mixer.dt_bias", "ssm_dt.bias"),
        ("mixer.A_log", "ssm_a"),
        ("mixer.D", "ssm_d"),
        ("mixer.norm.weight", "ssm_norm.weight"),
        ("mixer.out_proj.weight", "ssm_out.weight"),
    ],
    readings: &[("mixer.A_log", Reading::NegativeExp)],
    unused: &[],
};

/// The files give the width of all heads, from which `head_dim` follows. Special tokens that they do not name stay
/// unset: Hugging Face's defaults do not apply.
fn derive(config: &mut Map<String, Value>) {
    let number = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0);
    let head = number("intermediate_size") / number("num_attention_heads").max(1);
    config.insert("head_dim".into(), json!(head));
    for key in ["bos_token_id", "eos_token_id"] {
        config.entry(key).or_insert(Value::Null);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::GGUF;

    #[test]
    fn every_tensor_has_one_name_in_files() {
        let text = r#"{"model_type": "mamba2", "vocab_size": 97, "hidden_size": 32, "num_heads": 4, "head_dim": 16,
            "num_hidden_layers": 2, "state_size": 12, "n_groups": 2}"#;
        let config = crate::DecoderConfig::from_json(text).unwrap();
        let ours: Vec<String> = crate::checkpoint::tensors(&config).into_keys().collect();
        let theirs: BTreeSet<String> = ours.iter().map(|name| GGUF.names.theirs(name)).collect();
        assert!(theirs.iter().all(|name| !name.contains("backbone") && name != "lm_head.weight"), "{theirs:?}");
        assert_eq!(theirs.len(), ours.len());
        assert_eq!(GGUF.key("state_size"), "mamba2.ssm.state_size");
        assert_eq!(GGUF.key("rms_norm_eps"), "mamba2.attention.layer_norm_rms_epsilon");
    }
}
