//! RWKV-7's checkpoints as published in Hugging Face's layout (`RWKV7ForCausalLM` of flash-linear-attention):
//! translates the keys of their `config.json` to ours, and the first version's tensors to those of the second.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::config::ConfigError;
use crate::weights::Entry;

/// The activation of the channel mix: squared ReLU.
pub(super) const HIDDEN_ACT: &str = "sqrelu";

/// The mixer's name in our keys.
const ATTENTION: &str = "rwkv7";

/// Keys of this family that do not affect results: implementation choices and training settings.
const IGNORED: [&str; 8] = [
    "attn_mode",
    "fuse_cross_entropy",
    "fuse_linear_cross_entropy",
    "fuse_norm",
    "hidden_ratio",
    "max_position_embeddings",
    "use_l2warp",
    "value_dim",
];

/// Keys with only one supported value.
const FIXED: [(&str, Value); 3] =
    [("attn", Value::Null), ("norm_bias", Value::Bool(true)), ("norm_first", Value::Bool(true))];

/// Keys that have another name in Llama's configs.
const RENAMED: [(&str, &str); 2] = [("num_heads", "num_attention_heads"), ("norm_eps", "rms_norm_eps")];

/// The default length of a head.
const HEAD_DIM: u64 = 64;
/// The default width of the channel mix is a multiple of this.
const MULTIPLE: u64 = 32;

/// Translates published keys; keys that are already ours stay. Values of the wrong type stay, for the parser to report.
pub(in crate::mixers) fn translate(keys: &mut Map<String, Value>) -> Result<(), ConfigError> {
    keys.retain(|key, value| !(value.is_null() && ["head_dim", "intermediate_size"].contains(&&**key)));
    for (key, accepted) in FIXED {
        if let Some(found) = keys.remove(key).filter(|found| *found != accepted) {
            return Err(ConfigError::bound(key, accepted.to_string(), found));
        }
    }
    // As in flash-linear-attention, the head length takes precedence: some small models are published with another
    // model's number of heads.
    if keys.contains_key("head_dim") && keys.contains_key("hidden_size") {
        keys.remove("num_heads");
    }
    for (published, ours) in RENAMED {
        if let Some(value) = keys.remove(published).filter(|value| !value.is_null()) {
            keys.entry(ours).or_insert(value);
        }
    }
    let number = |keys: &Map<String, Value>, key: &str| keys.get(key).and_then(Value::as_u64);
    let hidden = number(keys, "hidden_size");
    if let Some(found) = keys.get("value_dim").filter(|found| hidden.is_some() && !is_width(found, hidden)) {
        return Err(ConfigError::bound("value_dim", "hidden_size in every layer", found));
    }
    if let (false, Some(hidden)) = (keys.contains_key("num_attention_heads"), hidden) {
        let d = number(keys, "head_dim").unwrap_or(HEAD_DIM);
        keys.insert("num_attention_heads".into(), json!(hidden / d.max(1)));
    }
    if let (false, Some(hidden)) = (keys.contains_key("intermediate_size"), hidden) {
        let ratio = keys.get("hidden_ratio").and_then(Value::as_f64).unwrap_or(4.0);
        let width = (hidden as f64 * ratio) as u64;
        keys.insert("intermediate_size".into(), json!(width.div_ceil(MULTIPLE).saturating_mul(MULTIPLE)));
    }
    if !keys.contains_key("low_ranks") {
        let ranks = low_ranks(keys)?;
        keys.insert("low_ranks".into(), ranks);
    }
    for key in IGNORED {
        keys.remove(key);
    }
    keys.entry("hidden_act").or_insert(HIDDEN_ACT.into());
    match keys.insert("attention".into(), ATTENTION.into()) {
        Some(found) if found != ATTENTION => Err(ConfigError::bound("attention", format!("{ATTENTION:?}"), found)),
        _ => Ok(()),
    }
}

/// Extracts the ranks from the published keys.
fn low_ranks(keys: &mut Map<String, Value>) -> Result<Value, ConfigError> {
    let mut ranks = Map::new();
    for (key, ours) in [
        ("decay_low_rank_dim", "decay"),
        ("a_low_rank_dim", "a"),
        ("v_low_rank_dim", "v"),
        ("gate_low_rank_dim", "gate"),
    ] {
        let given = keys.remove(key).filter(|value| !value.is_null());
        ranks.insert(ours.into(), given.ok_or_else(|| ConfigError::bound(key, "given", "none"))?);
    }
    Ok(ranks.into())
}

/// Returns whether a width of the values, for all layers or per layer, equals the model's.
fn is_width(found: &Value, hidden: Option<u64>) -> bool {
    match found {
        Value::Null => true,
        Value::Array(all) => all.iter().all(|one| one.as_u64() == hidden),
        one => one.as_u64() == hidden,
    }
}

/// The token-shift shares in one tensor, as in the first version.
const PACKED: &str = "attn.x_x";
/// The parts of the packed tensor, in order.
const PARTS: [&str; 6] = ["r", "w", "k", "v", "a", "g"];

/// Splits packed shares into their parts, which are stored one after another.
pub(super) fn unpack(entries: &mut BTreeMap<String, Entry>) {
    let packed: Vec<String> = entries.keys().filter(|name| name.ends_with(PACKED)).cloned().collect();
    for name in packed {
        let Some(Entry { kind, repacked, stored, shape, range, reading }) = entries.remove(&name) else { continue };
        let (parts, hidden) = (shape.first().copied(), shape.last().copied().unwrap_or(0));
        let whole = parts == Some(PARTS.len()) && shape.iter().product::<usize>() == PARTS.len() * hidden;
        if !whole {
            // It becomes an unknown tensor, which the checks report.
            entries.insert(name, Entry { kind, repacked, stored, shape, range, reading });
            continue;
        }
        let bytes = range.len() / PARTS.len();
        for (i, part) in PARTS.into_iter().enumerate() {
            let start = range.start + i * bytes;
            let range = start..start + bytes;
            let own = Entry { kind, repacked, stored: stored.clone(), shape: vec![1, 1, hidden], range, reading };
            entries.insert(format!("{}x_{part}", name.trim_end_matches("x_x")), own);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Attention, DecoderConfig, LowRanks, PositionEmbedding};

    /// The config published with the model of 1.5 B parameters.
    const PUBLISHED: &str = r#"{"a_low_rank_dim": 96, "architectures": ["RWKV7ForCausalLM"], "attn": null,
        "attn_mode": "chunk", "auto_map": {"AutoConfig": "modeling_rwkv7.RWKV7Config"}, "bos_token_id": 1,
        "decay_low_rank_dim": 96, "eos_token_id": 2, "fuse_cross_entropy": true, "fuse_norm": false,
        "gate_low_rank_dim": 256, "head_dim": 64, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "hidden_size": 2048,
        "initializer_range": 0.006, "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "rwkv7",
        "norm_bias": true, "norm_eps": 1e-05, "norm_first": true, "num_heads": 32, "num_hidden_layers": 24,
        "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.48.0", "use_cache": true,
        "v_low_rank_dim": 64, "value_dim": [2048, 2048], "vocab_size": 65536}"#;

    #[test]
    fn a_published_config_is_read_and_written_again() {
        let config = DecoderConfig::from_json(PUBLISHED).unwrap();
        assert_eq!((config.attention, config.num_attention_heads, config.head_dim), (Attention::Rwkv7, 32, 64));
        assert_eq!((config.position_embedding, config.gate), (PositionEmbedding::None, false));
        assert_eq!(config.low_ranks, Some(LowRanks { decay: 96, a: 96, v: 64, gate: 256 }));
        assert_eq!((config.mixer(), config.features(), config.cached_numbers()), ("rwkv7", 0, 0));
        assert_eq!(config.state_bytes(), 24 * (32 * 64 * 64 + 2 * 2048) * 4);
        // Counted by hand.
        assert_eq!(config.parameters(), 1_527_404_544);
        assert_eq!(DecoderConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn absent_sizes_follow_from_others() {
        let absent = [("\"num_heads\": 32,", "\"num_heads\": null,"), ("\"intermediate_size\": 8192,", "")];
        let text = absent.iter().fold(PUBLISHED.to_string(), |text, (from, to)| text.replace(from, to));
        let whole = DecoderConfig::from_json(PUBLISHED).unwrap();
        assert_eq!(DecoderConfig::from_json(&text).unwrap(), whole);
        assert_eq!(DecoderConfig::from_json(&text.replace("\"head_dim\": 64,", "\"head_dim\": null,")).unwrap(), whole);
        // The config published with the model of 0.1 B parameters.
        let other = PUBLISHED.replace("\"num_heads\": 32", "\"num_heads\": 12");
        assert_eq!(DecoderConfig::from_json(&other).unwrap(), whole);
        let odd = text.replace("\"hidden_ratio\": 4.0", "\"hidden_ratio\": 3.501");
        assert_eq!(DecoderConfig::from_json(&odd).unwrap().intermediate_size, 7200);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (from, to, words) in [
            ("\"attn\": null", "\"attn\": {\"layers\": [1]}", "attn must be null"),
            ("\"norm_bias\": true", "\"norm_bias\": false", "norm_bias must be true, found false"),
            ("\"norm_first\": true", "\"norm_first\": false", "norm_first must be true"),
            ("[2048, 2048]", "[2048, 1024]", "value_dim must be hidden_size in every layer"),
            ("\"v_low_rank_dim\": 64,", "", "v_low_rank_dim must be given, found none"),
            ("\"v_low_rank_dim\": 64", "\"v_low_rank_dim\": 0", "v_low_rank_dim must be between 1"),
            ("\"sqrelu\"", "\"silu\"", "hidden_act must be \"sqrelu\""),
            ("\"num_heads\": 32", "\"num_attention_heads\": 16", "head_dim must be hidden_size / num_heads"),
            ("\"head_dim\": 64,", "\"head_dim\": 8,", "head_dim must be a multiple of 16"),
            ("\"attn_mode\"", "\"atn_mode\"", "unknown field `atn_mode`"),
            ("\"attn_mode\": \"chunk\"", "\"attention\": \"rfa\"", "attention must be \"rwkv7\""),
            ("\"attn_mode\": \"chunk\"", "\"conv_kernel\": 4", "conv_kernel must be 0"),
            ("\"vocab_size\": 65536", "\"vocab_size\": \"all\"", "vocab_size: invalid type"),
            ("\"hidden_size\": 2048,", "", "missing field `hidden_size`"),
        ] {
            let text = PUBLISHED.replace(from, to);
            assert_ne!(text, PUBLISHED);
            let error = DecoderConfig::from_json(&text).unwrap_err().to_string();
            assert!(error.starts_with("config.json: ") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn other_families_have_no_low_ranks() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "proj_dim": 16,
            "low_ranks": {"decay": 1, "a": 1, "v": 1, "gate": 1}}"#;
        let error = DecoderConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains("low_ranks must be absent where model_type is rfa_gate"), "{error}");
    }
}
