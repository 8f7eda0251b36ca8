//! Mamba-2's checkpoints as published: translates the `config.json` keys of Hugging Face's `Mamba2ForCausalLM` or of
//! the `mamba_ssm` package to ours, and the package's tensor names.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::config::{ConfigError, DecoderConfig};
use crate::weights::Entry;

/// The `model_type` in `config.json`, and the mixer's name in our keys.
pub(in crate::mixers) const MODEL_TYPE: &str = "mamba2";

/// Keys of this family that do not affect results: implementation choices and training settings. The residual stream is
/// always f32.
const IGNORED: [&str; 10] = [
    "chunk_size",
    "norm_before_gate",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "time_step_scale",
];

/// Keys that have another name in Llama's configs.
const RENAMED: [(&str, &str); 2] = [("num_heads", "num_attention_heads"), ("layer_norm_epsilon", "rms_norm_eps")];

/// Values that Hugging Face's configs omit when they are the default.
const DEFAULTS: [(&str, u64); 8] = [
    ("vocab_size", 32_768),
    ("hidden_size", 4096),
    ("num_hidden_layers", 64),
    ("num_attention_heads", 128),
    ("head_dim", 64),
    ("conv_kernel", 4),
    ("bos_token_id", 0),
    ("eos_token_id", 2),
];

/// The width of all heads is `hidden_size` times this, unless the config says otherwise.
const EXPAND: f64 = 2.0;

/// Keys of `mamba_ssm`, and Hugging Face's names for them.
const PACKAGE: [(&str, &str); 4] = [
    ("d_model", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("tie_embeddings", "tie_word_embeddings"),
    ("vocab_size", "vocab_size"),
];
/// Keys of `mamba_ssm`'s layers, and Hugging Face's names for them.
const PACKAGE_LAYER: [(&str, &str); 8] = [
    ("bias", "use_bias"),
    ("chunk_size", "chunk_size"),
    ("conv_bias", "use_conv_bias"),
    ("d_conv", "conv_kernel"),
    ("d_state", "state_size"),
    ("expand", "expand"),
    ("headdim", "head_dim"),
    ("ngroups", "n_groups"),
];

/// Returns whether a config without a `model_type` comes from `mamba_ssm`.
pub(in crate::mixers) fn is_of_the_package(keys: &Map<String, Value>) -> bool {
    keys.get("ssm_cfg").and_then(|cfg| cfg.get("layer")).is_some_and(|layer| layer == "Mamba2")
}

/// Translates `mamba_ssm`'s keys to Hugging Face's.
pub(in crate::mixers) fn translate_package(keys: &mut Map<String, Value>) -> Result<(), ConfigError> {
    let mut out = Map::new();
    let Some(Value::Object(mut layer)) = keys.remove("ssm_cfg") else {
        return Err(ConfigError::bound("ssm_cfg", "an object", "none"));
    };
    layer.remove("layer");
    for (name, published) in PACKAGE_LAYER {
        layer.remove(name).and_then(|value| out.insert(published.into(), value));
    }
    if let Some((name, value)) = layer.iter().next() {
        return Err(ConfigError::bound("ssm_cfg", format!("without {name:?}"), value));
    }
    for (key, accepted) in [("attn_layer_idx", json!([])), ("d_intermediate", json!(0)), ("attn_cfg", json!({}))] {
        if let Some(found) = keys.remove(key).filter(|found| *found != accepted) {
            return Err(ConfigError::bound(key, accepted.to_string(), found));
        }
    }
    for (name, published) in PACKAGE {
        keys.remove(name).and_then(|value| out.insert(published.into(), value));
    }
    keys.remove("fused_add_norm");
    // The embedding is padded with rows beyond the vocabulary, for efficiency on GPUs.
    let multiple = keys.remove("pad_vocab_size_multiple").and_then(|value| value.as_u64()).unwrap_or(8).max(1);
    if let Some(size) = out.get("vocab_size").and_then(Value::as_u64) {
        out.insert("vocab_size".into(), json!(size.div_ceil(multiple).saturating_mul(multiple)));
    }
    out.append(keys);
    out.insert("model_type".into(), MODEL_TYPE.into());
    let number = |out: &Map<String, Value>, key: &str, default: f64| out.get(key).map_or(Some(default), Value::as_f64);
    let inner = number(&out, "hidden_size", 0.0).zip(number(&out, "expand", EXPAND)).map(|(hidden, by)| hidden * by);
    if let Some((inner, d)) = inner.zip(number(&out, "head_dim", 64.0)) {
        out.entry("num_heads").or_insert(json!((inner / d.max(1.0)) as u64));
    }
    // The package's models have one group, tie the output head to the embedding, and end texts with token 0.
    for (key, value) in [("n_groups", json!(1)), ("tie_word_embeddings", json!(true)), ("eos_token_id", json!(0))] {
        out.entry(key).or_insert(value);
    }
    *keys = out;
    Ok(())
}

/// Translates published keys; keys that are already ours stay. Values of the wrong type stay, for the parser to report.
pub(in crate::mixers) fn translate(keys: &mut Map<String, Value>) -> Result<(), ConfigError> {
    if let Some(found) = keys.remove("rms_norm").filter(|found| *found != json!(true)) {
        return Err(ConfigError::bound("rms_norm", "true", found));
    }
    for (published, ours) in RENAMED {
        if let Some(value) = keys.remove(published).filter(|value| !value.is_null()) {
            keys.entry(ours).or_insert(value);
        }
    }
    for (key, default) in DEFAULTS {
        keys.entry(key).or_insert(json!(default));
    }
    let expand = keys.remove("expand").filter(|value| !value.is_null());
    let given = keys.contains_key("intermediate_size");
    if let (true, Some(hidden)) = (expand.is_some() || !given, keys.get("hidden_size").and_then(Value::as_u64)) {
        let by = expand.as_ref().map_or(Some(EXPAND), Value::as_f64);
        let by = by.ok_or_else(|| ConfigError::bound("expand", "a number", expand.unwrap_or_default()))?;
        let inner = json!((hidden as f64 * by) as u64);
        let before = keys.insert("intermediate_size".into(), inner.clone());
        if let Some(found) = before.filter(|found| !found.is_null() && *found != inner) {
            return Err(ConfigError::bound("intermediate_size", "expand * hidden_size", found));
        }
    }
    if !keys.contains_key("state_space") {
        let space = state_space(keys);
        keys.insert("state_space".into(), space);
    }
    for key in IGNORED {
        keys.remove(key);
    }
    match keys.insert("attention".into(), MODEL_TYPE.into()) {
        Some(found) if found != MODEL_TYPE => Err(ConfigError::bound("attention", format!("{MODEL_TYPE:?}"), found)),
        _ => Ok(()),
    }
}

/// Extracts the shape of the layers from the published keys.
fn state_space(keys: &mut Map<String, Value>) -> Value {
    let mut take = |key: &str, default: Value| keys.remove(key).filter(|value| !value.is_null()).unwrap_or(default);
    let groups = take("n_groups", json!(8));
    let mut limit = take("time_step_limit", json!([0.0, null]));
    if let Some(most) = limit.get_mut(1).filter(|most| is_infinite(most)) {
        *most = Value::Null;
    }
    json!({
        "state_size": take("state_size", json!(128)),
        "n_groups": groups,
        "norm_groups": take("norm_groups", groups.clone()),
        "time_step_limit": limit,
        "use_bias": take("use_bias", json!(false)),
        "use_conv_bias": take("use_conv_bias", json!(true)),
    })
}

/// Returns whether a value is one of Hugging Face's ways to write infinity, which JSON numbers cannot express.
fn is_infinite(value: &Value) -> bool {
    value == "Infinity" || value.get("__float__").is_some_and(|name| name == "Infinity")
}

/// Replaces the bare word `Infinity`, which Python writes as a number but JSON does not allow, by `null`. Strings are
/// left alone.
pub(in crate::mixers) fn without_infinities(text: &str) -> Cow<'_, str> {
    const WORD: &str = "Infinity";
    let mut out = String::new();
    let (mut quoted, mut escaped, mut done) = (false, false, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b'I' if !quoted && text[at..].starts_with(WORD) => {
                out.push_str(&text[done..at]);
                out.push_str("null");
                done = at + WORD.len();
            }
            _ => {}
        }
    }
    if done == 0 {
        return text.into();
    }
    out.push_str(&text[done..]);
    out.into()
}

/// Gives the package's embedding its name in Hugging Face's layout, and drops an output head that is tied to the
/// embedding.
pub(super) fn unpack(config: &DecoderConfig, entries: &mut BTreeMap<String, Entry>) {
    if let Some(entry) = entries.remove("backbone.embedding.weight") {
        entries.entry("backbone.embeddings.weight".into()).or_insert(entry);
    }
    if config.tie_word_embeddings {
        entries.remove("lm_head.weight");
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Attention, DecoderConfig, PositionEmbedding, StateSpace};

    /// The config published with Codestral-Mamba.
    const CODESTRAL: &str = r#"{"architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256,
        "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "mamba2",
        "n_groups": 8, "norm_before_gate": true, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
        "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "state_size": 128,
        "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
        "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
        "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": false,
        "use_cache": true, "use_conv_bias": true, "vocab_size": 32768}"#;

    /// The config published with the 130M model.
    const PACKAGE: &str = r#"{"d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true,
        "fused_add_norm": true, "pad_vocab_size_multiple": 16, "tie_embeddings": true}"#;

    const SPACE: StateSpace = StateSpace {
        state_size: 128,
        n_groups: 8,
        norm_groups: 8,
        time_step_limit: (0.0, None),
        use_bias: false,
        use_conv_bias: true,
    };

    #[test]
    fn a_published_config_is_read_and_written_again() {
        let config = DecoderConfig::from_json(CODESTRAL).unwrap();
        assert_eq!((config.attention, config.num_attention_heads, config.head_dim), (Attention::Mamba2, 128, 64));
        assert_eq!((config.position_embedding, config.gate), (PositionEmbedding::None, false));
        assert_eq!((config.intermediate_size, config.conv_kernel), (8192, 4));
        assert_eq!(config.state_space, Some(SPACE));
        assert_eq!((config.mixer(), config.features(), config.cached_numbers()), ("mamba2", 0, 0));
        assert_eq!(config.state_bytes(), 64 * (128 * 128 * 64 + 3 * (8192 + 2 * 8 * 128)) * 4);
        // Counted by hand: each layer has a norm, two projections, the convolution, three parameters per head, and the
        // gated norm.
        let layer = 4096 + (8192 + 10_240 + 128) * 4096 + 8192 * 4096 + 10_240 * 5 + 3 * 128 + 8192;
        assert_eq!(config.parameters(), 2 * 32_768 * 4096 + 64 * layer + 4096);
        assert_eq!(DecoderConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn what_hugging_face_leaves_out_is_its_default() {
        let whole = DecoderConfig::from_json(CODESTRAL).unwrap();
        let short = r#"{"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "eos_token_id": 0,
            "torch_dtype": "bfloat16"}"#;
        let short = DecoderConfig::from_json(short).unwrap();
        assert_eq!((short.eos_token_id.as_slice(), &short), (&[0][..], &whole));
        for infinity in ["\"Infinity\"", "{\"__float__\": \"Infinity\"}", "null"] {
            let text = CODESTRAL.replace("Infinity", infinity);
            assert_eq!(DecoderConfig::from_json(&text).unwrap(), whole, "{infinity}");
        }
        let limited =
            CODESTRAL.replace("[0.0, Infinity]", "[0.001, 0.1]").replace("\"silu\"", "\"silu\", \"norm_groups\": 1");
        let space = DecoderConfig::from_json(&limited).unwrap().state_space;
        assert_eq!(space, Some(StateSpace { time_step_limit: (0.001, Some(0.1)), norm_groups: 1, ..SPACE }));
    }

    #[test]
    fn a_config_of_the_package_mamba_ssm_is_read() {
        let config = DecoderConfig::from_json(PACKAGE).unwrap();
        assert_eq!((config.hidden_size, config.num_hidden_layers, config.vocab_size), (768, 24, 50_288));
        assert_eq!((config.num_attention_heads, config.head_dim, config.tie_word_embeddings), (24, 64, true));
        assert_eq!(config.state_space, Some(StateSpace { n_groups: 1, norm_groups: 1, ..SPACE }));
        assert_eq!(config.eos_token_id.as_slice(), [0]);
        // The published size is 130 M.
        let layer = 768 + 3352 * 768 + 1536 * 768 + 1792 * 5 + 3 * 24 + 1536;
        assert_eq!(config.parameters(), 50_288 * 768 + 24 * layer + 768);
        let other = PACKAGE.replace("\"Mamba2\"", "\"Mamba2\", \"d_state\": 64, \"headdim\": 32, \"ngroups\": 2");
        let config = DecoderConfig::from_json(&other).unwrap();
        assert_eq!((config.num_attention_heads, config.head_dim), (48, 32));
        assert_eq!(config.state_space, Some(StateSpace { state_size: 64, n_groups: 2, norm_groups: 2, ..SPACE }));
        for (from, to, words) in [
            ("\"attn_layer_idx\": []", "\"attn_layer_idx\": [3]", "attn_layer_idx must be [], found [3]"),
            ("\"d_intermediate\": 0", "\"d_intermediate\": 64", "d_intermediate must be 0, found 64"),
            ("\"Mamba2\"", "\"Mamba2\", \"d_ssm\": 4", "ssm_cfg must be without \"d_ssm\", found 4"),
            ("\"fused_add_norm\"", "\"fused_ad_norm\"", "unknown field `fused_ad_norm`"),
        ] {
            let error = DecoderConfig::from_json(&PACKAGE.replace(from, to)).unwrap_err().to_string();
            assert!(error.starts_with("config.json: ") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (from, to, words) in [
            ("\"rms_norm\": true", "\"rms_norm\": false", "rms_norm must be true, found false"),
            ("\"silu\"", "\"gelu\"", "hidden_act must be \"silu\""),
            ("\"num_heads\": 128", "\"num_heads\": 64", "intermediate_size must be num_heads * head_dim"),
            ("\"expand\": 2", "\"expand\": 4", "intermediate_size must be expand * hidden_size, found 8192"),
            ("\"expand\": 2", "\"expand\": \"two\"", "expand must be a number"),
            ("\"n_groups\": 8", "\"n_groups\": 3", "n_groups must be a divisor of num_heads (128), found 3"),
            ("\"n_groups\": 8", "\"n_groups\": 0", "n_groups must be a divisor"),
            ("\"n_groups\": 8", "\"norm_groups\": 3", "norm_groups must be a divisor of all channels (8192)"),
            ("\"state_size\": 128", "\"state_size\": 0", "state_size must be between 1 and 1024"),
            ("\"state_size\": 128", "\"state_size\": \"wide\"", "state_space.state_size: invalid type"),
            ("[0.0, Infinity]", "[1.0, 0.5]", "time_step_limit must be two ascending numbers from 0, found [1, 0.5]"),
            ("[0.0, Infinity]", "[-1.0, 0.5]", "time_step_limit must be two ascending"),
            ("[0.0, Infinity]", "0.5", "state_space.time_step_limit: invalid type"),
            ("\"conv_kernel\": 4", "\"conv_kernel\": 0", "conv_kernel must be between 2 and 16"),
            ("\"chunk_size\"", "\"chunk_sise\"", "unknown field `chunk_sise`"),
            ("\"chunk_size\": 256", "\"attention\": \"rfa\"", "attention must be \"mamba2\""),
            ("\"chunk_size\": 256", "\"sliding_window\": 9", "sliding_window must be absent"),
            ("\"chunk_size\": 256", "\"output_norm\": true", "output_norm must be false"),
            ("\"chunk_size\": 256", "\"position_embedding\": \"rope\"", "position_embedding must be \"none\""),
            (
                "\"chunk_size\": 256",
                "\"low_ranks\": {\"decay\": 1, \"a\": 1, \"v\": 1, \"gate\": 1}",
                "low_ranks must be absent where model_type is mamba2",
            ),
            ("\"vocab_size\": 32768", "\"vocab_size\": \"Infinity\"", "vocab_size: invalid type: string"),
            ("\"vocab_size\": 32768", "\"vocab_size\": Infinity", "vocab_size: invalid type: null"),
        ] {
            let text = CODESTRAL.replace(from, to);
            assert_ne!(text, CODESTRAL);
            let error = DecoderConfig::from_json(&text).unwrap_err().to_string();
            assert!(error.starts_with("config.json: ") && error.contains(words), "{error}");
        }
    }

    #[test]
    fn other_families_have_no_state_space() {
        let text = r#"{"model_type": "rfa_gate", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "proj_dim": 16, "state_space": {"state_size": 16,
            "n_groups": 1, "norm_groups": 1, "time_step_limit": [0.0, null], "use_bias": false, "use_conv_bias": true}}"#;
        let error = DecoderConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains("state_space must be absent where model_type is rfa_gate"), "{error}");
    }
}
