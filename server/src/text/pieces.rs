//! Single tokens as people want to see them: their bytes and their names.

use super::TextError;
use super::tokenizer::{Tokenizer, ids};

impl Tokenizer {
    /// The ids of `text`, `whole` with the special tokens that the tokenizer puts around one; a special token's text
    /// inside it stays a text.
    ///
    /// # Errors
    /// A text that the tokenizer refuses.
    pub fn encode_plain(&self, text: &str, whole: bool) -> Result<Vec<u32>, TextError> {
        let plain = self.plain.get_or_init(|| {
            let mut plain = self.inner.clone();
            plain.set_encode_special_tokens(true);
            plain
        });
        ids(plain, text, whole)
    }

    /// What `id` stands for, in bytes: those that it adds to a text, or a special token's own text.
    pub fn piece(&self, id: u32) -> &[u8] {
        match self.special(id) {
            Some(text) => text.as_bytes(),
            None => self.vocabulary().bytes(id),
        }
    }

    /// A special token's own text, where `id` is one.
    pub fn special(&self, id: u32) -> Option<&str> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
        added.special.then_some(added.content.as_str())
    }

    /// The name that the vocabulary has for `id`, in the tokenizer's own alphabet; empty where it has none.
    pub fn name(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }
}
