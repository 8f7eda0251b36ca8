//! The keys that `config.json` contains in addition to those of the architecture, because `save_pretrained` of Hugging
//! Face's `transformers` writes them for every model: how the file was made, settings for other tasks and programs, and
//! sampling settings from before `generation_config.json` existed. None of them changes what a model computes.

use serde_json::{Map, Value};

/// The keys of `transformers` 4 and 5, and of programs that train with it.
const KEYS: [&str; 61] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "add_cross_attention",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "layer_types",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

/// Removes the generic keys from a config.
pub(super) fn remove(keys: &mut Map<String, Value>) {
    for key in KEYS {
        keys.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use crate::config::DecoderConfig;

    /// What `transformers` 4.x writes for every model when it includes defaults, without the keys of the architecture.
    const WRITTEN: &str = r#"{"_name_or_path": "org/base", "add_cross_attention": false, "architectures": ["X"],
        "bad_words_ids": null, "begin_suppress_tokens": null, "bos_token_id": 1, "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": null, "decoder_start_token_id": null, "diversity_penalty": 0.0,
        "do_sample": false, "early_stopping": false, "encoder_no_repeat_ngram_size": 0, "eos_token_id": 2,
        "exponential_decay_length_penalty": null, "finetuning_task": null, "forced_bos_token_id": null,
        "forced_eos_token_id": null, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": false,
        "is_encoder_decoder": false, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0,
        "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
        "num_return_sequences": 1, "output_attentions": false, "output_hidden_states": false,
        "output_scores": false, "pad_token_id": null, "prefix": null, "problem_type": null, "pruned_heads": {},
        "remove_invalid_values": false, "repetition_penalty": 1.0, "return_dict": true,
        "return_dict_in_generate": false, "sep_token_id": null, "suppress_tokens": null,
        "task_specific_params": null, "temperature": 1.0, "tf_legacy_loss": false, "tie_encoder_decoder": false,
        "tie_word_embeddings": false, "tokenizer_class": null, "top_k": 50, "top_p": 1.0, "torch_dtype": "bfloat16",
        "torchscript": false, "transformers_version": "4.46.3", "typical_p": 1.0, "use_bfloat16": false,
        "_attn_implementation_autoset": true, "use_cache": true}"#;

    fn with(keys: &Value) -> Map<String, Value> {
        let mut written: Map<String, Value> = serde_json::from_str(WRITTEN).unwrap();
        written.extend(keys.as_object().unwrap().clone());
        written
    }

    #[test]
    fn what_is_written_for_every_model_changes_nothing_in_any_published_family() {
        let families = [
            json!({"model_type": "rwkv7", "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 300, "head_dim": 64,
                "a_low_rank_dim": 8, "decay_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8}),
            json!({"model_type": "mamba2", "hidden_size": 128, "num_heads": 4, "head_dim": 64, "n_groups": 1}),
        ];
        for keys in families {
            let plain = [("bos_token_id", json!(1)), ("eos_token_id", json!(2)), ("torch_dtype", json!("bfloat16"))];
            let mut plain: Map<String, Value> = plain.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
            plain
                .extend([("architectures".to_owned(), json!(["X"])), ("tie_word_embeddings".to_owned(), json!(false))]);
            plain.extend(keys.as_object().unwrap().clone());
            let read = |keys: Map<String, Value>| DecoderConfig::from_json(&Value::Object(keys).to_string());
            assert_eq!(read(with(&keys)).unwrap(), read(plain).unwrap());
            let mut misspelt = with(&keys);
            misspelt.insert("pruned_head".into(), json!({}));
            assert!(read(misspelt).unwrap_err().to_string().contains("unknown field `pruned_head`"));
        }
    }
}
