//! Tests which `config.json` texts are accepted, and what they mean.

use super::*;

const SMALL: &str = r#"{"model_type": "rfa_gate", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "proj_dim": 16, "eos_token_id": [0, 3]}"#;

fn changed(from: &str, to: &str) -> String {
    DecoderConfig::from_json(&SMALL.replace(from, to)).unwrap_err().to_string()
}

#[test]
fn defaults_are_filled_in() {
    let config = DecoderConfig::from_json(SMALL).unwrap();
    assert_eq!((config.head_dim, config.gate, config.conv_kernel), (16, true, 0));
    assert_eq!(config.eos_token_id.as_slice(), [0, 3]);
    assert_eq!(config.state_bytes(), 2 * 2 * (2 * 16 * 17 + 1) * 4);
}

#[test]
fn softmax_has_rope_and_the_windows_keys_and_values() {
    let text = SMALL.replace("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 24");
    let config = DecoderConfig::from_json(&text).unwrap();
    assert_eq!((config.position_embedding, config.gate, config.proj_dim), (PositionEmbedding::Rope, false, 0));
    assert_eq!(config.state_bytes(), 2 * 2 * (2 * 24 * 16) * 4);
    let block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32;
    assert_eq!(config.parameters(), 2 * block + 2 * 97 * 32 + 32);
    let again = DecoderConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    let none = text.replace("\"sliding_window\"", "\"position_embedding\": \"none\", \"sliding_window\"");
    assert_eq!(DecoderConfig::from_json(&none).unwrap().position_embedding, PositionEmbedding::None);
}

#[test]
fn an_unknown_key_is_named() {
    assert!(changed("\"proj_dim\"", "\"projdim\": 3, \"proj_dim\"").contains("projdim"));
}

#[test]
fn a_value_of_the_wrong_type_and_a_key_that_is_absent_are_named() {
    for (from, to, words) in [
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"feature_map\": \"relu\"", "feature_map: unknown variant `relu`"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"gate\": 1", "gate: invalid type"),
        ("\"proj_dim\": 16", "\"proj_dim\": -1", "proj_dim: invalid value"),
        ("[0, 3]", "[0, \"a\"]", "eos_token_id: "),
        ("\"vocab_size\": 97,", "", "missing field `vocab_size`"),
        ("\"proj_dim\": 16, ", "", "proj_dim must be between 1 and 4096, found none"),
        ("\"proj_dim\": 16", "\"proj_dim\": 0", "proj_dim must be between 1 and 4096, found 0"),
        ("\"proj_dim\": 16", "\"attention\": \"softmax\"", "sliding_window must be between 1 and 16777216, found none"),
        ("[0, 3]}", "[0, 3]} x", "trailing characters"),
    ] {
        let message = changed(from, to);
        assert!(message.starts_with("config.json: ") && message.contains(words), "{message}");
    }
}

#[test]
fn a_bound_names_its_field() {
    for (from, to, field) in [
        ("\"vocab_size\": 97", "\"vocab_size\": 0", "vocab_size"),
        ("\"proj_dim\": 16", "\"proj_dim\": 5000", "proj_dim"),
        ("\"proj_dim\": 16", "\"gate\": true", "proj_dim"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"sliding_window\": 64", "sliding_window"),
        ("\"proj_dim\": 16", "\"attention\": \"softmax\"", "sliding_window"),
        ("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 0", "sliding_window"),
        ("\"proj_dim\": 16", "\"attention\": \"softmax\", \"sliding_window\": 8, \"head_dim\": 7", "head_dim"),
        ("rfa_gate", "llama", "model_type"),
        ("[0, 3]", "97", "eos_token_id"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"conv_kernel\": 1", "conv_kernel"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"feature_map\": \"elu\"", "proj_dim"),
        ("\"proj_dim\": 16", "\"feature_map\": \"favor\"", "proj_dim"),
        ("\"proj_dim\": 16", "\"feature_map\": \"arc_cosine\"", "proj_dim"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"attention\": \"hybrid\"", "sliding_window"),
        ("\"proj_dim\": 16", "\"attention\": \"hybrid\", \"sliding_window\": 8", "proj_dim"),
        (
            "\"proj_dim\": 16",
            "\"proj_dim\": 16, \"attention\": \"hybrid\", \"sliding_window\": 8, \"feature_map\": \"favor\"",
            "feature_map",
        ),
        ("\"num_attention_heads\": 2", "\"num_attention_heads\": 3", "head_dim"),
        ("\"proj_dim\": 16", "\"proj_dim\": 16, \"head_dim\": 7, \"position_embedding\": \"rope\"", "head_dim"),
    ] {
        let message = changed(from, to);
        assert!(message.contains(field), "{message}");
    }
}

/// Parameters that every kind of attention has in a block: the four projections, the feed-forward part and the norms.
const BLOCK: u64 = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32;
const TABLES: u64 = 2 * 97 * 32 + 32;

#[test]
fn every_feature_map_has_its_own_features_state_and_numbers() {
    let (sigma, gate) = (32, 2 * 33);
    // The map's keys, its number of features, the state elements per head and its own trained parameters.
    for (keys, features, state, own) in [
        ("\"proj_dim\": 16", 32, 32 * 17 + 1, sigma + gate),
        ("\"proj_dim\": 16, \"gate\": false", 32, 32 * 17 + 1, sigma),
        ("\"proj_dim\": 16, \"feature_map\": \"arc_cosine\"", 16, 16 * 17 + 1, sigma + gate),
        ("\"head_dim\": 16, \"feature_map\": \"elu\"", 16, 16 * 17 + 1, gate),
        ("\"proj_dim\": 0, \"feature_map\": \"elu\", \"gate\": false", 16, 16 * 17 + 1, 0),
        ("\"proj_dim\": 24, \"feature_map\": \"favor\"", 24, 24 * 17 + 2, gate),
    ] {
        let config = DecoderConfig::from_json(&SMALL.replace("\"proj_dim\": 16", keys)).unwrap();
        assert_eq!((config.features(), config.head_state_len()), (features, state), "{keys}");
        assert_eq!(config.parameters(), 2 * (BLOCK + own) + TABLES, "{keys}");
        assert_eq!(config.position_embedding, PositionEmbedding::None, "{keys}");
        assert_eq!(DecoderConfig::from_json(&serde_json::to_string(&config).unwrap()).unwrap(), config, "{keys}");
    }
}

#[test]
fn hybrid_has_rope_and_remembers_both_sums_and_window() {
    let keys = "\"proj_dim\": 16, \"attention\": \"hybrid\", \"sliding_window\": 24";
    let config = DecoderConfig::from_json(&SMALL.replace("\"proj_dim\": 16", keys)).unwrap();
    assert_eq!((config.position_embedding, config.features()), (PositionEmbedding::Rope, 32));
    assert_eq!(config.head_state_len(), 32 * 17 + 1 + 2 * 24 * 16 + 24);
    assert_eq!(config.parameters(), 2 * (BLOCK + 32 + 2 * 33 + 2) + TABLES);
    let plain = DecoderConfig { gate: false, ..config };
    assert_eq!(plain.head_state_len(), 32 * 17 + 1 + 2 * 24 * 16);
}
