//! Checkpoints with random weights of the families that only candle has, in the layouts in which they are published.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test binary uses a part")]

use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tidegate_model::random::Normals;

/// The families.
pub const FAMILIES: [&str; 4] = ["mamba", "recurrent_gemma", "rwkv5", "rwkv6"];

/// Names and shapes.
pub type Tensors = Vec<(String, Vec<usize>)>;

/// The config of a family.
pub fn config(kind: &str, vocab: usize, hidden: usize) -> Value {
    if kind == "mamba" {
        return json!({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": vocab,
            "hidden_size": hidden, "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4, "expand": 2,
            "intermediate_size": 2 * hidden, "time_step_rank": hidden.div_ceil(16), "hidden_act": "silu",
            "layer_norm_epsilon": 1e-5, "use_bias": false, "use_conv_bias": true, "bos_token_id": 0, "eos_token_id": 0,
            "residual_in_fp32": true, "rms_norm": true, "ssm_cfg": {}, "pad_vocab_size_multiple": 8,
            "torch_dtype": "float32"});
    }
    if kind == "recurrent_gemma" {
        return json!({"model_type": kind, "architectures": ["RecurrentGemmaForCausalLM"], "vocab_size": vocab,
            "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 3,
            "_block_types": ["recurrent", "attention"], "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": hidden / 4, "lru_width": 3 * hidden / 2, "attention_window_size": 16, "conv1d_width": 4,
            "logits_soft_cap": 30.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": false, "bos_token_id": 2, "eos_token_id": 1,
            "pad_token_id": 0, "torch_dtype": "bfloat16"});
    }
    json!({"model_type": kind, "architectures": ["RwkvForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
        "num_hidden_layers": 2, "attention_hidden_size": hidden, "head_size": 32, "head_size_divisor": 8,
        "num_attention_heads": 64, "intermediate_size": null, "layer_norm_epsilon": 1e-5, "rescale_every": 6,
        "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 0, "use_cache": true})
}

/// The tensors that such a config has, under Hugging Face's names.
pub fn tensors(config: &Value) -> Tensors {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (vocab, h, layers) = (number("vocab_size"), number("hidden_size"), number("num_hidden_layers"));
    let mut all: Tensors = Vec::new();
    let mut add = |name: String, shape: &[usize]| all.push((name, shape.to_vec()));
    if config["model_type"] == "recurrent_gemma" {
        return recurrent_gemma(config);
    }
    if config["model_type"] == "mamba" {
        let (inner, rank) = (2 * h, h.div_ceil(16));
        add("backbone.embeddings.weight".into(), &[vocab, h]);
        add("backbone.norm_f.weight".into(), &[h]);
        for i in 0..layers {
            add(format!("backbone.layers.{i}.norm.weight"), &[h]);
            for (name, shape) in [
                ("A_log", &[inner, 16][..]),
                ("D", &[inner]),
                ("conv1d.weight", &[inner, 1, 4]),
                ("conv1d.bias", &[inner]),
                ("in_proj.weight", &[2 * inner, h]),
                ("x_proj.weight", &[rank + 32, inner]),
                ("dt_proj.weight", &[inner, rank]),
                ("dt_proj.bias", &[inner]),
                ("out_proj.weight", &[h, inner]),
            ] {
                add(format!("backbone.layers.{i}.mixer.{name}"), shape);
            }
        }
        return all;
    }
    let (size, wide) = (number("head_size"), h * 7 / 2 / 32 * 32);
    let heads = h / size;
    add("rwkv.embeddings.weight".into(), &[vocab, h]);
    add("head.weight".into(), &[vocab, h]);
    let norms = (0..layers).flat_map(|i| [format!("blocks.{i}.ln1"), format!("blocks.{i}.ln2")]);
    let heads_norms = (0..layers).map(|i| format!("blocks.{i}.attention.ln_x"));
    for norm in norms.chain(heads_norms).chain(["blocks.0.pre_ln".into(), "ln_out".into()]) {
        add(format!("rwkv.{norm}.weight"), &[h]);
        add(format!("rwkv.{norm}.bias"), &[h]);
    }
    let (shares, own): (&[&str], &[(&str, &[usize])]) = if config["model_type"] == "rwkv5" {
        (
            &[
                "attention.time_mix_key",
                "attention.time_mix_value",
                "attention.time_mix_receptance",
                "attention.time_mix_gate",
                "feed_forward.time_mix_key",
                "feed_forward.time_mix_receptance",
            ],
            &[("attention.time_decay", &[heads, size])],
        )
    } else {
        (
            &[
                "attention.time_maa_x",
                "attention.time_maa_w",
                "attention.time_maa_k",
                "attention.time_maa_v",
                "attention.time_maa_r",
                "attention.time_maa_g",
                "attention.time_decay",
                "feed_forward.time_maa_k",
                "feed_forward.time_maa_r",
            ],
            &[
                ("attention.time_decay_w1", &[h, 2 * heads]),
                ("attention.time_decay_w2", &[2 * heads, h]),
                ("attention.time_maa_w1", &[h, 5 * heads]),
                ("attention.time_maa_w2", &[5, heads, h]),
            ],
        )
    };
    for i in 0..layers {
        for name in shares {
            add(format!("rwkv.blocks.{i}.{name}"), &[1, 1, h]);
        }
        for (name, shape) in own {
            add(format!("rwkv.blocks.{i}.{name}"), shape);
        }
        add(format!("rwkv.blocks.{i}.attention.time_faaaa"), &[heads, size]);
        for name in ["key", "receptance", "value", "gate", "output"] {
            add(format!("rwkv.blocks.{i}.attention.{name}.weight"), &[h, h]);
        }
        for (name, shape) in [("key", [wide, h]), ("receptance", [h, h]), ("value", [h, wide])] {
            add(format!("rwkv.blocks.{i}.feed_forward.{name}.weight"), &shape);
        }
    }
    all
}

/// The tensors of RecurrentGemma; every second layer has attention.
fn recurrent_gemma(config: &Value) -> Tensors {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (h, inner, heads) = (number("hidden_size"), number("intermediate_size") / 2, number("num_attention_heads"));
    let keys = number("num_key_value_heads") * number("head_dim");
    let lru = number("lru_width");
    let size = lru / heads;
    let mut all: Tensors = vec![
        ("model.embed_tokens.weight".into(), vec![number("vocab_size"), h]),
        ("model.final_norm.weight".into(), vec![h]),
    ];
    let mut add = |i: usize, tensors: &[(&str, &[usize])]| {
        all.extend(tensors.iter().map(|(name, shape)| (format!("model.layers.{i}.{name}"), shape.to_vec())));
    };
    for i in 0..number("num_hidden_layers") {
        add(
            i,
            &[
                ("temporal_pre_norm.weight", &[h]),
                ("channel_pre_norm.weight", &[h]),
                ("mlp_block.gate_proj.weight", &[inner, h]),
                ("mlp_block.gate_proj.bias", &[inner]),
                ("mlp_block.up_proj.weight", &[inner, h]),
                ("mlp_block.up_proj.bias", &[inner]),
                ("mlp_block.down_proj.weight", &[h, inner]),
                ("mlp_block.down_proj.bias", &[h]),
            ],
        );
        if i % 2 == 1 {
            add(
                i,
                &[
                    ("temporal_block.q_proj.weight", &[h, h]),
                    ("temporal_block.k_proj.weight", &[keys, h]),
                    ("temporal_block.v_proj.weight", &[keys, h]),
                    ("temporal_block.o_proj.weight", &[h, h]),
                    ("temporal_block.o_proj.bias", &[h]),
                ],
            );
            continue;
        }
        for gate in ["input_gate", "recurrent_gate"] {
            let (weight, bias) =
                (format!("temporal_block.rg_lru.{gate}_weight"), format!("temporal_block.rg_lru.{gate}_bias"));
            add(i, &[(&weight, &[heads, size, size]), (&bias, &[heads, size])]);
        }
        add(
            i,
            &[
                ("temporal_block.linear_x.weight", &[lru, h]),
                ("temporal_block.linear_x.bias", &[lru]),
                ("temporal_block.linear_y.weight", &[lru, h]),
                ("temporal_block.linear_y.bias", &[lru]),
                ("temporal_block.linear_out.weight", &[h, lru]),
                ("temporal_block.linear_out.bias", &[h]),
                ("temporal_block.conv_1d.weight", &[lru, 1, 4]),
                ("temporal_block.conv_1d.bias", &[lru]),
                ("temporal_block.rg_lru.recurrent_param", &[lru]),
            ],
        );
    }
    all
}

/// Writes a config and random weights of these tensors, which are nowhere all zeros or all ones.
pub fn write(folder: &Path, config: &Value, tensors: &Tensors, seed: u64) {
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut normals = Normals::new(seed);
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape)| {
            let fan_in = *shape.last().unwrap() as f32;
            let (mean, spread) = match name.as_str() {
                n if n.contains("norm") && n.ends_with("weight") || n.contains(".ln") && n.ends_with("weight") => {
                    (1.0, 0.3)
                }
                n if n.ends_with("bias") || n.ends_with("time_faaaa") || n.ends_with("A_log") => (0.0, 0.5),
                // Decays with half-lives from one token to some dozens.
                n if n.ends_with("time_decay") || n.ends_with("recurrent_param") => (-2.0, 1.0),
                n if n.contains("time_m") && shape.len() == 3 && shape[1] == 1 => (0.5, 0.3),
                n if n.ends_with("mixer.D") => (1.0, 0.5),
                n if n.contains("embedding") => (0.0, 1.0),
                _ => (0.0, 1.0 / fan_in.sqrt()),
            };
            let number = |_| (mean + spread * normals.normal() as f32).to_le_bytes();
            let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(number).collect();
            (name.clone(), shape.clone(), bytes)
        })
        .collect();
    let views =
        tensors.iter().map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

/// A checkpoint of a family.
pub fn written(kind: &str, vocab: usize, hidden: usize, seed: u64) -> tempfile::TempDir {
    let (folder, config) = (tempfile::tempdir().unwrap(), config(kind, vocab, hidden));
    write(folder.path(), &config, &tensors(&config), seed);
    folder
}
