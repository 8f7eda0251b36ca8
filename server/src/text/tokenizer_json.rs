//! Tokenizers in the format of Hugging Face's `tokenizers`: byte-level tokenizers, and those in the style of
//! SentencePiece.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use serde::de::IgnoredAny;
use tokenizers::decoders::DecoderWrapper;

use super::encoder::{Encoded, Encoder, Pace};
use super::error::TextError;
use super::sentence_pieces::{self, Continuing};
use super::split::{self, Splitter, caught, ids};
use super::vocabulary::{Vocabulary, byte_of};

/// A tokenizer from a `tokenizer.json`.
pub(super) struct TokenizerJson {
    tokenizer: Arc<Library>,
    /// `None` if a text can only be encoded as a whole.
    splitter: Option<Splitter>,
    /// The tokenizer for texts that continue others, if it differs.
    more: Option<Box<Self>>,
    /// Set on a tokenizer for texts that continue others, if it differs: encodes the rest of a text from its first
    /// special token on.
    after_special: Option<Arc<Library>>,
}

/// A tokenizer of the library.
struct Library {
    inner: tokenizers::Tokenizer,
    /// A copy that treats the text of special tokens like any other text. Created on first use.
    plain: OnceLock<tokenizers::Tokenizer>,
}

impl Library {
    fn new(inner: tokenizers::Tokenizer) -> Arc<Self> {
        Arc::new(Self { inner, plain: OnceLock::new() })
    }

    /// Returns the tokenizer for plain text, or the normal one.
    fn choose(&self, plain: bool) -> &tokenizers::Tokenizer {
        if !plain {
            return &self.inner;
        }
        self.plain.get_or_init(|| {
            let mut plain = self.inner.clone();
            plain.set_encode_special_tokens(true);
            plain
        })
    }
}

impl TokenizerJson {
    /// Reads the file `path`, a `tokenizer.json`, for a model of `vocab_size` tokens.
    pub(super) fn load(path: &Path, vocab_size: usize) -> Result<(Self, Vocabulary), TextError> {
        let bytes = std::fs::read(path).map_err(|source| TextError::Read { path: path.into(), source })?;
        Self::parse(&bytes, vocab_size).map_err(|reason| TextError::Contents { path: path.into(), reason })
    }

    /// Parses the contents of a `tokenizer.json`. The error is the reason why they are invalid.
    pub(super) fn parse(json: &[u8], vocab_size: usize) -> Result<(Self, Vocabulary), String> {
        // The library panics on some files that are not JSON, and perhaps on others.
        serde_json::from_slice::<IgnoredAny>(json).map_err(|error| error.to_string())?;
        let read = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(json)));
        let read = read.map_err(|_| "the library tokenizers panicked at it")?;
        let mut inner = read.map_err(|error| error.to_string())?;
        // A prompt must never be truncated or padded silently.
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        let longest = |vocabulary: &Vocabulary| vocabulary.tokens().map(<[u8]>::len).max().unwrap_or(0);
        if matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            let vocabulary = vocabulary(&inner, vocab_size, byte_level, String::into_bytes)?;
            let splitter = Splitter::of(&inner, longest(&vocabulary));
            return Ok((
                Self { tokenizer: Library::new(inner), splitter, more: None, after_special: None },
                vocabulary,
            ));
        }
        sentence_pieces::check(&inner)?;
        let bytes = |text: String| sentence_pieces::bytes(&text);
        let mut vocabulary = vocabulary(&inner, vocab_size, bytes, bytes)?;
        let splitter = Splitter::of_sentence_pieces(&inner, longest(&vocabulary));
        let continuing = sentence_pieces::continuing(&inner)?;
        let whole = Library::new(inner);
        let more = continuing.map(|Continuing { tokenizer, after_special }| {
            let after_special = after_special.then(|| Arc::clone(&whole));
            Box::new(Self { tokenizer: Library::new(tokenizer), splitter: splitter.clone(), more: None, after_special })
        });
        if more.is_some() {
            vocabulary = vocabulary.with_added_space();
        }
        Ok((Self { tokenizer: whole, splitter, more, after_special: None }, vocabulary))
    }

    fn more(&self) -> &Self {
        self.more.as_deref().unwrap_or(self)
    }

    /// Encodes `text`; with `whole`, including the special tokens around it.
    fn ids(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError> {
        let tokenizer = self.tokenizer.choose(plain);
        let Some(library) = &self.after_special else { return ids(tokenizer, text, whole) };
        let encoding = caught(|| tokenizer.encode(text, whole))?;
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        // Tokens that are not matched in the normalized text divide it before any space is added.
        let divides = |id: &u32| added.get(id).is_some_and(|token| !token.normalized);
        let all = encoding.get_ids();
        let Some(first) = all.iter().position(divides) else { return Ok(all.to_vec()) };
        let (start, _) = encoding.get_offsets()[first];
        Ok([&all[..first], &ids(library.choose(plain), &text[start..], false)?].concat())
    }

    /// Returns the special tokens before every text, without those after it.
    pub(super) fn begin(&self) -> Result<Vec<u32>, TextError> {
        let (bare, mut all) = (ids(&self.tokenizer.inner, "a", false)?, ids(&self.tokenizer.inner, "a", true)?);
        let before = all.windows(bare.len().max(1)).position(|window| window == bare).unwrap_or(0);
        all.truncate(before);
        Ok(all)
    }
}

impl Encoder for TokenizerJson {
    fn encode(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError> {
        self.ids(text, whole, plain)
    }

    fn encode_in_pieces(
        &self,
        text: &str,
        plain: bool,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Option<Encoded<'_>>, TextError> {
        split::encode_in_pieces(self.splitter.as_ref(), text, pace, target, |piece, first| {
            let tokenizer = if first { self } else { self.more() };
            tokenizer.ids(piece, false, plain)
        })
    }

    fn more(&self) -> &dyn Encoder {
        self.more()
    }

    fn special(&self, id: u32) -> Option<&str> {
        let added = self.tokenizer.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
        added.special.then_some(added.content.as_str())
    }

    fn name(&self, id: u32) -> Option<String> {
        Some(self.tokenizer.inner.id_to_token(id).unwrap_or_default())
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.tokenizer.inner.token_to_id(text)
    }
}

/// Returns the bytes of every token, or the reason why they do not fit a model of `vocab_size` tokens. `bytes` converts
/// a token of the library's model, and `added` an added token.
fn vocabulary(
    tokenizer: &tokenizers::Tokenizer,
    vocab_size: usize,
    bytes: impl Fn(String) -> Vec<u8>,
    added: impl Fn(String) -> Vec<u8>,
) -> Result<Vocabulary, String> {
    let mut tokens: Vec<Box<[u8]>> = vec![Box::default(); vocab_size];
    let mut insert = |id: u32, bytes: Vec<u8>| match tokens.get_mut(id as usize) {
        Some(token) => {
            *token = bytes.into();
            Ok(())
        }
        None => Err(format!("token ids must be below the model's vocab_size ({vocab_size}), found {id}")),
    };
    for (text, id) in tokenizer.get_vocab(false) {
        insert(id, bytes(text))?;
    }
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        insert(id, if token.special { Vec::new() } else { added(token.content) })?;
    }
    Ok(Vocabulary::new(tokens))
}

/// Returns the bytes of a token in the alphabet of byte-level tokenizers.
fn byte_level(text: String) -> Vec<u8> {
    let bytes = text.chars().map(byte_of).collect::<Option<Vec<u8>>>();
    // A token outside the alphabet was added by hand and stands for its own text.
    bytes.unwrap_or_else(|| text.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_json_is_refused_where_the_library_panics() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny/tokenizer.json");
        let text = std::fs::read_to_string(path).unwrap();
        assert!(TokenizerJson::parse(text.as_bytes(), 300).is_ok());
        let at = text.find("\"decoder\"").unwrap();
        let inside = at + text[at..].find("trim_offsets").unwrap();
        for (from, to) in [("trim_offsets", "trim\noffsets"), ("trim_offsets\":", "trim_offsets\" "), ("true", "tru")] {
            let changed = [&text[..inside], &text[inside..].replacen(from, to, 1)].concat();
            assert_ne!(changed, text);
            let reason = TokenizerJson::parse(changed.as_bytes(), 300).err().unwrap();
            assert!(reason.contains(" line "), "{reason}");
        }
    }
}
