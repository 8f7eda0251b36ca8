//! Single tokens for display: their bytes and their names.

use super::tokenizer::{TextError, Tokenizer, ids};

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
