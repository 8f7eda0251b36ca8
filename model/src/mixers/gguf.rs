//! Model families in GGUF files as llama.cpp writes them: which metadata keys hold the values of a `config.json`, and
//! the names of the tensors. A family is a set of tables.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::names::{Names, TensorNames};
use crate::weights::{Entry, Metadata, MetadataError};

/// The key of the token list, whose length is the vocabulary size.
const TOKENS: &str = "tokenizer.ggml.tokens";
/// Special token ids: our config keys and their metadata keys.
const TOKEN_IDS: Names =
    &[("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")];

/// How llama.cpp stores a family.
#[derive(Debug)]
pub(crate) struct GgufFamily {
    /// The value of `general.architecture`, which is also our `model_type`.
    pub(crate) architecture: &'static str,
    /// Integer keys: ours in `config.json`, and the metadata key without the architecture prefix.
    pub(super) numbers: Names,
    /// Float keys, in the same form.
    pub(super) floats: Names,
    /// The names of the family's tensors.
    pub(crate) names: TensorNames,
    /// The output head's name, if files without one share the embedding.
    pub(super) may_be_tied: Option<&'static str>,
    /// Adds config keys that follow from others.
    pub(super) derive: fn(&mut Map<String, Value>),
}

impl GgufFamily {
    /// Builds the text of a `config.json` for a file with this metadata and these tensors.
    ///
    /// # Errors
    /// A key is absent or has a value of another type.
    pub(crate) fn config(
        &self,
        metadata: &Metadata,
        entries: &BTreeMap<String, Entry>,
    ) -> Result<String, MetadataError> {
        let mut config = Map::new();
        config.insert("model_type".into(), self.architecture.into());
        let absent = |key: &str| MetadataError::new(key, "given", "none");
        for (ours, theirs) in self.numbers {
            let key = self.key_of(theirs);
            config.insert((*ours).into(), json!(metadata.number(&key)?.ok_or_else(|| absent(&key))?));
        }
        for (ours, theirs) in self.floats {
            let key = self.key_of(theirs);
            config.insert((*ours).into(), json!(metadata.float(&key)?.ok_or_else(|| absent(&key))?));
        }
        for (ours, key) in TOKEN_IDS {
            if let Some(id) = metadata.number(key)? {
                config.insert((*ours).into(), json!(id));
            }
        }
        let tokens = metadata.texts(TOKENS)?.ok_or_else(|| absent(TOKENS))?;
        config.insert("vocab_size".into(), json!(tokens.len()));
        if self.may_be_tied.is_some_and(|head| !entries.contains_key(head)) {
            config.insert("tie_word_embeddings".into(), json!(true));
        }
        (self.derive)(&mut config);
        Ok(Value::Object(config).to_string())
    }

    fn key_of(&self, theirs: &str) -> String {
        format!("{}.{theirs}", self.architecture)
    }

    /// The metadata key that provides a key of `config.json`.
    pub(crate) fn key(&self, ours: &str) -> String {
        if ours == "vocab_size" {
            return TOKENS.into();
        }
        let token = TOKEN_IDS.iter().find(|(key, _)| *key == ours).map(|(_, theirs)| (*theirs).into());
        let of = |names: Names| names.iter().find(|(key, _)| *key == ours).map(|(_, theirs)| self.key_of(theirs));
        token.or_else(|| of(self.numbers)).or_else(|| of(self.floats)).unwrap_or_else(|| ours.into())
    }
}
