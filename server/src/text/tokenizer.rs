//! The tokenizer, which turns text into token ids, and the ids that end a text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::encoder::Encoder;
use super::error::TextError;
use super::tokenizer_json::TokenizerJson;
use super::vocabulary::Vocabulary;
use super::world::{WorldError, WorldTokenizer};
use super::world_file;

/// `generation_config.json`: the defaults that the model's authors recommend.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct GenerationDefaults {
    /// Ids that end a text.
    #[serde(default)]
    pub(crate) eos_token_id: Option<OneOrMany>,
    /// Sampling temperature.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Nucleus probability.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// Number of candidates; 0 means all.
    #[serde(default)]
    pub top_k: Option<usize>,
    /// Smallest probability of a candidate, relative to the likeliest token.
    #[serde(default)]
    pub min_p: Option<f64>,
    /// Penalty on tokens that occurred before.
    #[serde(default)]
    pub repetition_penalty: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

/// The part of `tokenizer_config.json` that serving needs.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    #[serde(default)]
    eos_token: Option<SpecialToken>,
    #[serde(default)]
    bos_token: Option<SpecialToken>,
    #[serde(default)]
    add_bos_token: Option<bool>,
    /// Read only if the vocabulary's file has no added tokens.
    #[serde(default)]
    added_tokens_decoder: Option<Value>,
}

/// A token that is not in the vocabulary's file.
#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    special: bool,
}

/// A special token, which Hugging Face writes as a string or as an object with `content`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum SpecialToken {
    Text(String),
    Object { content: String },
}

impl SpecialToken {
    /// The token's text.
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

/// A tokenizer whose ids all fit the model.
pub struct Tokenizer {
    pub(super) encoder: Box<dyn Encoder>,
    vocabulary: Arc<Vocabulary>,
    defaults: GenerationDefaults,
    eos: Arc<[u32]>,
    /// The special tokens before every text.
    begin: Vec<u32>,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a checkpoint's folder, or else RWKV's vocabulary file, and `generation_config.json`
    /// and `tokenizer_config.json` if they exist. `vocab_size` is the model's. `model_eos`, the end-of-text ids from
    /// the model's `config.json`, are used if `generation_config.json` names none.
    ///
    /// # Errors
    /// A file cannot be read or parsed, the tokenizer is of another kind, or an id is outside the model's vocabulary.
    pub fn load(folder: &Path, vocab_size: usize, model_eos: &[u32]) -> Result<Self, TextError> {
        let defaults: GenerationDefaults = optional_json(&folder.join("generation_config.json"))?.unwrap_or_default();
        let config_path = folder.join("tokenizer_config.json");
        let mut config: TokenizerConfig = optional_json(&config_path)?.unwrap_or_default();
        let eos_token = config.eos_token.take().map(SpecialToken::into_text);
        let mut tokenizer = if let Some(path) = world_vocabulary(folder) {
            let world = with_settings(world_file::load(&path)?, config, vocab_size)
                .map_err(|reason| TextError::Contents { path: config_path, reason })?;
            Self::from_world(world, vocab_size, defaults).map_err(|error| world_file::wrong(&path, error))?
        } else {
            let (encoder, vocabulary) = TokenizerJson::load(&folder.join("tokenizer.json"), vocab_size)?;
            let begin = encoder.begin()?;
            Self::new(Box::new(encoder), vocabulary, begin, defaults)
        };
        let eos = match &tokenizer.defaults.eos_token_id {
            Some(OneOrMany::One(id)) => vec![*id],
            Some(OneOrMany::Many(ids)) => ids.clone(),
            None if !model_eos.is_empty() => model_eos.to_vec(),
            None => eos_token.and_then(|text| tokenizer.encoder.id(&text)).into_iter().collect(),
        };
        if let Some(id) = eos.iter().find(|id| **id as usize >= vocab_size) {
            let reason = format!("eos_token_id must be below vocab_size ({vocab_size}), found {id}");
            return Err(TextError::Contents { path: folder.join("generation_config.json"), reason });
        }
        tokenizer.end_with(&eos);
        Ok(tokenizer)
    }

    /// Loads RWKV's tokenizer for the model file `model`: the vocabulary beside it, or else `elsewhere`.
    ///
    /// # Errors
    /// There is no such file, or it is invalid.
    pub fn of_file(model: &Path, elsewhere: Option<&Path>, vocab_size: usize) -> Result<Self, TextError> {
        let path = world_file::of_file(model, elsewhere).ok_or_else(|| {
            let reason =
                "RWKV's vocabulary file, rwkv_vocab_v20230424.txt, must be in the same folder, or be named".into();
            TextError::Contents { path: model.into(), reason }
        })?;
        let tokenizer = Self::from_world(world_file::load(&path)?, vocab_size, GenerationDefaults::default());
        tokenizer.map_err(|error| world_file::wrong(&path, error))
    }

    /// Creates an RWKV tokenizer for a model of `vocab_size` tokens. Its own end-of-text token ends texts.
    ///
    /// # Errors
    /// An id is outside the model's vocabulary.
    pub fn from_world(
        world: WorldTokenizer,
        vocab_size: usize,
        defaults: GenerationDefaults,
    ) -> Result<Self, WorldError> {
        let vocabulary = Vocabulary::new(world.bytes(vocab_size)?);
        let (begin, end) = (world.begin().to_vec(), world.end());
        let mut tokenizer = Self::new(Box::new(world), vocabulary, begin, defaults);
        tokenizer.eos = end.into_iter().collect();
        Ok(tokenizer)
    }

    pub(super) fn new(
        encoder: Box<dyn Encoder>,
        vocabulary: Vocabulary,
        begin: Vec<u32>,
        defaults: GenerationDefaults,
    ) -> Self {
        Self { encoder, vocabulary: Arc::new(vocabulary), defaults, eos: Arc::from([]), begin }
    }

    /// Makes these ids (below the model's `vocab_size`) end a text, in addition to those that the tokenizer knows.
    pub fn end_with(&mut self, ids: &[u32]) {
        let known = self.eos.iter().filter(|id| !ids.contains(id));
        self.eos = ids.iter().chain(known).copied().collect();
    }

    /// Encodes `text`, with the special tokens that the tokenizer puts around a text.
    ///
    /// Here and in the other two encodings, the text of a special token (`<|endoftext|>`) becomes that token, even in
    /// untrusted input. Callers must filter input from users who may not write special tokens.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encoder.encode(text, true, false)
    }

    /// Encodes a text that continues a stored one, without special tokens around it. Nothing is merged across the
    /// boundary, so the ids may differ from those of the whole text in one piece.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_more(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encoder.more().encode(text, false, false)
    }

    /// Encodes a conversation rendered by a chat template. The tokens that begin every text come first exactly once,
    /// whether the template writes them or leaves them to the tokenizer. None are added at the end, where the answer
    /// follows.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let ids = self.encoder.encode(text, false, false)?;
        if ids.starts_with(&self.begin) {
            return Ok(ids);
        }
        Ok([self.begin.as_slice(), &ids].concat())
    }

    /// Returns the bytes of each token.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Returns the special tokens before every text.
    pub fn begin(&self) -> &[u32] {
        &self.begin
    }

    /// Returns the ids that end a text.
    pub fn eos(&self) -> &Arc<[u32]> {
        &self.eos
    }

    /// Returns the defaults that the model's authors recommend.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.defaults
    }
}

/// Returns the tokenizer's file for the checkpoint in `folder`; it may not exist.
pub fn tokenizer_file(folder: &Path) -> PathBuf {
    world_vocabulary(folder).unwrap_or_else(|| folder.join("tokenizer.json"))
}

/// Returns RWKV's vocabulary file, if it is the tokenizer of the checkpoint in `folder`.
pub(super) fn world_vocabulary(folder: &Path) -> Option<PathBuf> {
    if folder.join("tokenizer.json").exists() { None } else { world_file::find(folder) }
}

/// Applies the settings of `tokenizer_config.json` to `world`.
fn with_settings(
    mut world: WorldTokenizer,
    config: TokenizerConfig,
    vocab_size: usize,
) -> Result<WorldTokenizer, String> {
    let added = config.added_tokens_decoder.map(BTreeMap::<u32, AddedToken>::deserialize).transpose();
    let added = added.map_err(|error| format!("added_tokens_decoder: {error}"))?;
    for (id, AddedToken { content, special }) in added.unwrap_or_default() {
        if id as usize >= vocab_size {
            return Err(format!("added_tokens_decoder: ids must be below vocab_size ({vocab_size}), found {id}"));
        }
        world = world.with_added(id, &content, special);
    }
    let begin = config.bos_token.filter(|_| config.add_bos_token == Some(true)).map(SpecialToken::into_text);
    let begin = begin.map(|text| world.id(&text).ok_or(format!("bos_token: {text:?} is no token"))).transpose()?;
    Ok(world.with_begin(begin.into_iter().collect()))
}

pub(super) fn optional_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<Option<T>, TextError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TextError::Read { path: path.into(), source }),
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| TextError::Contents { path: path.into(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Detokenizer;
    use crate::text::vocabulary::byte_of;

    /// A byte-level tokenizer without merges: one token per byte, after `<|endoftext|>` as id 0.
    fn write_bytes_tokenizer(folder: &Path) {
        let mut vocab = serde_json::Map::new();
        vocab.insert("<|endoftext|>".into(), 0.into());
        for character in (0..0x200).filter_map(char::from_u32) {
            if let Some(byte) = byte_of(character) {
                vocab.insert(character.to_string(), (u32::from(byte) + 1).into());
            }
        }
        let special = serde_json::json!({"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special], "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
        });
        std::fs::write(folder.join("tokenizer.json"), json.to_string()).unwrap();
    }

    fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let (mut detokenizer, mut out) = (Detokenizer::new(), String::new());
        for id in ids {
            detokenizer.push(tokenizer.vocabulary().bytes(*id), &mut out);
        }
        detokenizer.finish(&mut out);
        out
    }

    #[test]
    fn a_text_survives_encoding_and_decoding() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let tokenizer = Tokenizer::load(folder.path(), 300, &[0]).unwrap();
        for text in ["", "Once upon a time", "naïve ☃\n\t🦀  spaces", "\0\u{7f}\u{ad}\u{a0}"] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(ids[0], 0, "the special token comes first");
            assert_eq!(decode(&tokenizer, &ids), text);
        }
    }

    #[test]
    fn beginning_tokens_occur_once_in_a_conversation_and_never_in_added_text() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let tokenizer = Tokenizer::load(folder.path(), 300, &[0]).unwrap();
        let (h, i) = (u32::from(b'H') + 1, u32::from(b'i') + 1);
        assert_eq!(tokenizer.encode("<|endoftext|>Hi").unwrap(), [0, 0, h, i]);
        assert_eq!(tokenizer.encode_chat("<|endoftext|>Hi").unwrap(), [0, h, i]);
        assert_eq!(tokenizer.encode_chat("Hi").unwrap(), [0, h, i]);
        assert_eq!(tokenizer.encode_chat("").unwrap(), [0]);
        assert_eq!(tokenizer.encode_more("Hi").unwrap(), [h, i]);
        assert_eq!(tokenizer.encode_more("H<|endoftext|>i").unwrap(), [h, 0, i]);
        assert_eq!(tokenizer.encode_more("").unwrap(), [0; 0]);
    }

    #[test]
    fn ending_tokens_are_not_added_to_a_conversation() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let path = folder.path().join("tokenizer.json");
        let json = std::fs::read_to_string(&path).unwrap();
        let before = r#"[{"SpecialToken":{"id":"<|endoftext|>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}]"#;
        let both = before.replace(']', r#",{"SpecialToken":{"id":"<|endoftext|>","type_id":0}}]"#);
        assert!(json.contains(before), "{json}");
        std::fs::write(path, json.replace(before, &both)).unwrap();
        let tokenizer = Tokenizer::load(folder.path(), 300, &[0]).unwrap();
        let h = u32::from(b'H') + 1;
        assert_eq!(tokenizer.encode("H").unwrap(), [0, h, 0]);
        assert_eq!(tokenizer.encode_chat("H").unwrap(), [0, h]);
    }

    #[test]
    fn a_long_run_of_one_character_is_encoded_completely() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let tokenizer = Tokenizer::load(folder.path(), 300, &[0]).unwrap();
        for text in [" ".repeat(200_000), "a".repeat(200_000), "\n".repeat(100_000) + "x"] {
            assert_eq!(tokenizer.encode(&text).unwrap().len(), text.len() + 1);
        }
    }

    #[test]
    fn an_id_outside_the_model_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let error = Tokenizer::load(folder.path(), 256, &[0]).err().unwrap().to_string();
        assert!(error.contains("vocab_size (256), found 256"), "{error}");
        std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [0, 300]}"#).unwrap();
        let error = Tokenizer::load(folder.path(), 300, &[0]).err().unwrap().to_string();
        assert!(error.contains("eos_token_id must be below vocab_size (300), found 300"), "{error}");
    }

    #[test]
    fn the_end_of_a_text_comes_from_the_most_specific_file() {
        let folder = tempfile::tempdir().unwrap();
        write_bytes_tokenizer(folder.path());
        let eos = |model: &[u32]| Tokenizer::load(folder.path(), 300, model).unwrap().eos().to_vec();
        assert_eq!(eos(&[]), Vec::<u32>::new());
        std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
        assert_eq!(eos(&[]), [0]);
        assert_eq!(eos(&[7]), [7]);
        std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": 5, "top_p": 0.9}"#).unwrap();
        assert_eq!(eos(&[7]), [5]);
        assert_eq!(Tokenizer::load(folder.path(), 300, &[]).unwrap().defaults().top_p, Some(0.9));
    }

    #[test]
    fn missing_and_broken_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = Tokenizer::load(folder.path(), 300, &[]).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
        write_bytes_tokenizer(folder.path());
        std::fs::write(folder.path().join("generation_config.json"), "{").unwrap();
        let error = Tokenizer::load(folder.path(), 300, &[]).err().unwrap().to_string();
        assert!(error.contains("generation_config.json"), "{error}");
    }
}
