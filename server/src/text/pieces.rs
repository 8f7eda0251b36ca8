//! Gives the bytes and the names of single tokens, for display.

use super::error::TextError;
use super::tokenizer::Tokenizer;

impl Tokenizer {
    /// Encodes `text`, treating the text of special tokens like any other text. With `whole`, adds the special tokens
    /// that the tokenizer puts around a text.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn encode_plain(&self, text: &str, whole: bool) -> Result<Vec<u32>, TextError> {
        self.encoder.encode(text, whole, true)
    }

    /// Returns the bytes that `id` adds to a text, or the text of a special token.
    pub fn piece(&self, id: u32) -> &[u8] {
        match self.special(id) {
            Some(text) => text.as_bytes(),
            None => self.vocabulary().bytes(id),
        }
    }

    /// Returns the bytes of tokens from the beginning of a text, including the texts of special tokens. A space that
    /// the tokenizer puts before a text is left out. After a special token it is kept, as the library does.
    pub fn pieces(&self, ids: &[u32]) -> Vec<u8> {
        let bytes = ids.iter().flat_map(|id| self.piece(*id)).copied().collect();
        let is_text = ids.first().is_some_and(|id| self.special(*id).is_none());
        if is_text { self.vocabulary().without_added_space(bytes) } else { bytes }
    }

    /// Returns the text of a special token; `None` for other tokens.
    pub fn special(&self, id: u32) -> Option<&str> {
        self.encoder.special(id)
    }

    /// For RWKV tokenizers, returns the text of the special token between two texts, which may be empty; `None` for
    /// others.
    pub fn world_separator(&self) -> Option<&str> {
        self.encoder.world_separator()
    }

    /// Returns the token's name in the vocabulary, in the tokenizer's own alphabet; empty if it has none.
    pub fn name(&self, id: u32) -> String {
        self.encoder.name(id).unwrap_or_else(|| String::from_utf8_lossy(self.piece(id)).into_owned())
    }
}
