//! Single tokens for display: their bytes, their names, and their positions in a text.

use super::tokenizer::{TextError, Tokenizer, ids};

/// A token and its position in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The token.
    pub id: u32,
    /// Index of its first character.
    pub start: usize,
    /// Index after its last character.
    pub stop: usize,
    /// Index of its first byte, and index after its last byte.
    pub bytes: (usize, usize),
}

impl Tokenizer {
    /// The ids of `text`, treating the text of special tokens like any other. With `whole`, the special tokens that the
    /// tokenizer puts around a text are added.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_plain(&self, text: &str, whole: bool) -> Result<Vec<u32>, TextError> {
        let plain = self.plain.get_or_init(|| {
            let mut plain = self.inner.clone();
            plain.set_encode_special_tokens(true);
            plain
        });
        ids(plain, text, whole)
    }

    /// The tokens of `text` with their positions, including the special tokens around it.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn spans(&self, text: &str) -> Result<Vec<Span>, TextError> {
        let encoding = self.inner.encode_char_offsets(text, true);
        let encoding = encoding.map_err(|error| TextError::Encode(error.to_string()))?;
        let mut offsets: Vec<usize> = text.char_indices().map(|(offset, _)| offset).collect();
        offsets.push(text.len());
        let byte = |character: usize| offsets[character.min(offsets.len() - 1)];
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        Ok(tokens.map(|(&id, &(start, stop))| Span { id, start, stop, bytes: (byte(start), byte(stop)) }).collect())
    }

    /// The bytes that `id` adds to a text, or the text of a special token.
    pub fn piece(&self, id: u32) -> &[u8] {
        match self.special(id) {
            Some(text) => text.as_bytes(),
            None => self.vocabulary().bytes(id),
        }
    }

    /// The text of a special token; `None` for other tokens.
    pub fn special(&self, id: u32) -> Option<&str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
        added.special.then_some(added.content.as_str())
    }

    /// The token's name in the vocabulary, in the tokenizer's own alphabet; empty if it has none.
    pub fn name(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }
}
