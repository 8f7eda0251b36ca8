//! Families in GGUF files as llama.cpp writes them: where the metadata has the values of a `config.json`, and what tensors
//! are called there. A family is a set of tables.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::weights::{Entry, Metadata, MetadataError};

/// Names of ours, each with that in the files.
pub(super) type Names = &'static [(&'static str, &'static str)];

/// The list of tokens, whose length is the size of the vocabulary.
const TOKENS: &str = "tokenizer.ggml.tokens";
/// Tokens of our config.
const TOKEN_IDS: Names =
    &[("bos_token_id", "tokenizer.ggml.bos_token_id"), ("eos_token_id", "tokenizer.ggml.eos_token_id")];

/// How llama.cpp writes a family.
#[derive(Debug)]
pub(crate) struct GgufFamily {
    /// Its `general.architecture`, which is our `model_type` too.
    pub(crate) architecture: &'static str,
    /// Keys of a `config.json` with whole numbers; theirs without the architecture.
    pub(super) numbers: Names,
    /// The same with floats.
    pub(super) floats: Names,
    /// Tensors outside the layers.
    pub(super) tensors: Names,
    /// Tensors of a layer, ours below `model.layers.N`, theirs below `blk.N`.
    pub(super) layers: Names,
    /// Tensors that files have for llama.cpp alone.
    pub(super) unused: &'static [&'static str],
}

impl GgufFamily {
    /// The text of a `config.json`.
    ///
    /// # Errors
    /// A key is absent or has a value of another type.
    pub(crate) fn config(&self, metadata: &Metadata) -> Result<String, MetadataError> {
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
        Ok(Value::Object(config).to_string())
    }

    fn key_of(&self, theirs: &str) -> String {
        format!("{}.{theirs}", self.architecture)
    }

    /// The key of the metadata that a key of a `config.json` comes from.
    pub(crate) fn key(&self, ours: &str) -> String {
        if ours == "vocab_size" {
            return TOKENS.into();
        }
        let token = TOKEN_IDS.iter().find(|(key, _)| *key == ours).map(|(_, theirs)| (*theirs).into());
        let of = |names: Names| names.iter().find(|(key, _)| *key == ours).map(|(_, theirs)| self.key_of(theirs));
        token.or_else(|| of(self.numbers)).or_else(|| of(self.floats)).unwrap_or_else(|| ours.into())
    }

    /// Gives the tensors of a file our names; the second part are the names of those that the family does not have.
    pub(crate) fn rename(&self, entries: BTreeMap<String, Entry>) -> (BTreeMap<String, Entry>, Vec<String>) {
        let (mut renamed, mut unknown) = (BTreeMap::new(), Vec::new());
        for (name, entry) in entries {
            match self.ours(&name) {
                Some(ours) => drop(renamed.insert(ours, entry)),
                None if self.unused.contains(&&*name) => {}
                None => unknown.push(name),
            }
        }
        (renamed, unknown)
    }

    /// Our name of a tensor. No two names become one, because the tables are one to one.
    fn ours(&self, theirs: &str) -> Option<String> {
        if self.unused.contains(&theirs) {
            return None;
        }
        if let Some((ours, _)) = self.tensors.iter().find(|(_, name)| *name == theirs) {
            return Some((*ours).into());
        }
        let (layer, name) = theirs.strip_prefix("blk.")?.split_once('.')?;
        let (ours, _) = self.layers.iter().find(|(_, known)| *known == name)?;
        Some(format!("model.layers.{layer}.{ours}"))
    }

    /// The name of a tensor in files.
    pub(crate) fn theirs(&self, ours: &str) -> String {
        let known = self.tensors.iter().find(|(name, _)| *name == ours).map(|(_, theirs)| (*theirs).into());
        let of_layer = || {
            let (layer, name) = ours.strip_prefix("model.layers.")?.split_once('.')?;
            let (_, theirs) = self.layers.iter().find(|(known, _)| *known == name)?;
            Some(format!("blk.{layer}.{theirs}"))
        };
        known.or_else(of_layer).unwrap_or_else(|| ours.into())
    }
}
