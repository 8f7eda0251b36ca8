//! RWKV-7 in GGUF files as llama.cpp writes them. All values are those of the published checkpoints; the token-shift
//! shares are fused into one tensor, as in the first published version.

use crate::mixers::gguf::GgufFamily;
use crate::mixers::names::{Names, TensorNames};

/// The tables of the family for GGUF files.
pub(in crate::mixers) const GGUF: GgufFamily = GgufFamily {
    architecture: "rwkv7",
    numbers: &[
        ("hidden_size", "embedding_length"),
        ("num_hidden_layers", "block_count"),
        ("intermediate_size", "feed_forward_length"),
        ("head_dim", "wkv.head_size"),
        ("decay_low_rank_dim", "attention.decay_lora_rank"),
        ("a_low_rank_dim", "attention.iclr_lora_rank"),
        ("v_low_rank_dim", "attention.value_residual_mix_lora_rank"),
        ("gate_low_rank_dim", "attention.gate_lora_rank"),
    ],
    floats: &[("rms_norm_eps", "attention.layer_norm_epsilon")],
    names: NAMES,
    may_be_tied: None,
    derive: |_| {},
};

const NAMES: TensorNames = TensorNames {
    tensors: &[
        ("model.embeddings.weight", "token_embd.weight"),
        ("model.layers.0.pre_norm.weight", "token_embd_norm.weight"),
        ("model.layers.0.pre_norm.bias", "token_embd_norm.bias"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.norm.bias", "output_norm.bias"),
        ("lm_head.weight", "output.weight"),
    ],
    layer: ("model.layers.", "blk."),
    layers: LAYERS,
    readings: &[],
    // The first layer has no earlier values to mix in, but llama.cpp reads these tensors anyway.
    unused: &["blk.0.time_mix_v0.weight", "blk.0.time_mix_v1.weight", "blk.0.time_mix_v2.weight"],
};

/// The fused shares. The table lists them before their parts, because files contain them fused.
const SHARES: &str = "time_mix_lerp_fused.weight";

const LAYERS: Names = &[
    ("attn_norm.weight", "attn_norm.weight"),
    ("attn_norm.bias", "attn_norm.bias"),
    ("attn.x_x", SHARES),
    ("attn.x_r", SHARES),
    ("attn.x_w", SHARES),
    ("attn.x_k", SHARES),
    ("attn.x_v", SHARES),
    ("attn.x_a", SHARES),
    ("attn.x_g", SHARES),
    ("attn.r_proj.weight", "time_mix_receptance.weight"),
    ("attn.k_proj.weight", "time_mix_key.weight"),
    ("attn.v_proj.weight", "time_mix_value.weight"),
    ("attn.o_proj.weight", "time_mix_output.weight"),
    ("attn.w_lora.lora.0.weight", "time_mix_w1.weight"),
    ("attn.w_lora.lora.2.weight", "time_mix_w2.weight"),
    ("attn.w_lora.lora.2.bias", "time_mix_w0.weight"),
    ("attn.a_lora.lora.0.weight", "time_mix_a1.weight"),
    ("attn.a_lora.lora.2.weight", "time_mix_a2.weight"),
    ("attn.a_lora.lora.2.bias", "time_mix_a0.weight"),
    ("attn.v_lora.lora.0.weight", "time_mix_v1.weight"),
    ("attn.v_lora.lora.2.weight", "time_mix_v2.weight"),
    ("attn.v_lora.lora.2.bias", "time_mix_v0.weight"),
    ("attn.g_lora.lora.0.weight", "time_mix_g1.weight"),
    ("attn.g_lora.lora.2.weight", "time_mix_g2.weight"),
    ("attn.k_k", "time_mix_k_k.weight"),
    ("attn.k_a", "time_mix_k_a.weight"),
    ("attn.r_k", "time_mix_r_k.weight"),
    ("attn.g_norm.weight", "time_mix_ln.weight"),
    ("attn.g_norm.bias", "time_mix_ln.bias"),
    ("ffn_norm.weight", "attn_norm_2.weight"),
    ("ffn_norm.bias", "attn_norm_2.bias"),
    ("ffn.x_k", "channel_mix_lerp_k.weight"),
    ("ffn.key.weight", "channel_mix_key.weight"),
    ("ffn.value.weight", "channel_mix_value.weight"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::GGUF;

    #[test]
    fn every_tensor_has_one_name_in_files() {
        let text = r#"{"model_type": "rwkv7", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
            "num_hidden_layers": 2, "decay_low_rank_dim": 4, "a_low_rank_dim": 4, "v_low_rank_dim": 4,
            "gate_low_rank_dim": 4}"#;
        let config = crate::DecoderConfig::from_json(text).unwrap();
        let ours: Vec<String> = crate::checkpoint::tensors(&config).into_keys().collect();
        let theirs: BTreeSet<String> = ours.iter().map(|name| GGUF.names.theirs(name)).collect();
        assert!(theirs.iter().all(|name| !name.contains("model") && name != "lm_head.weight"), "{theirs:?}");
        // In each layer, six shares are one tensor.
        assert_eq!(theirs.len(), ours.len() - 2 * 5);
        assert!(theirs.contains("blk.1.time_mix_v0.weight") && !theirs.contains("blk.0.time_mix_v0.weight"));
        assert_eq!(GGUF.key("head_dim"), "rwkv7.wkv.head_size");
        assert_eq!(GGUF.key("rms_norm_eps"), "rwkv7.attention.layer_norm_epsilon");
        assert_eq!(GGUF.key("eos_token_id"), "tokenizer.ggml.eos_token_id");
    }
}
