//! The interface of a tokenizer implementation: it encodes texts and knows the names of tokens.

use std::sync::Arc;

use super::error::TextError;

/// A function that encodes a piece of text as tokens.
pub type Encode = Arc<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// How far a text is encoded, and what happens between its pieces.
pub struct Pace<'a> {
    /// Most tokens. Encoding stops soon after reaching this number, so a result may have more.
    pub most: usize,
    /// Called after each piece except the last.
    pub pause: &'a mut dyn FnMut(),
}

/// The ids of a text that was encoded in pieces, and the special tokens that belong before and after it.
pub(super) struct Encoded<'a> {
    pub(super) ids: Vec<u32>,
    pub(super) before: &'a [u32],
    pub(super) after: &'a [u32],
}

/// A tokenizer implementation. In a plain encoding, the text of a special token is ordinary text; otherwise it becomes
/// that token.
pub(super) trait Encoder: Send + Sync {
    /// Encodes `text`; with `whole`, including the special tokens around it.
    fn encode(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError>;

    /// Encodes `text` in pieces of about `target` bytes. Returns `None` if it is short enough to be encoded at once.
    fn encode_in_pieces(
        &self,
        text: &str,
        plain: bool,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Option<Encoded<'_>>, TextError>;

    /// Returns the encoder for texts that continue another. Some tokenizers treat the beginning of a text in a special
    /// way.
    fn more(&self) -> &dyn Encoder;

    /// Returns the text of a special token; `None` for other tokens.
    fn special(&self, id: u32) -> Option<&str>;

    /// Returns the token's name in the vocabulary, in the tokenizer's own alphabet; `None` if the name is just its
    /// bytes.
    fn name(&self, id: u32) -> Option<String>;

    /// Returns the token that has this text.
    fn id(&self, text: &str) -> Option<u32>;

    /// For RWKV tokenizers, returns the text of the special token between two texts, which may be empty; `None` for
    /// others.
    fn world_separator(&self) -> Option<&str> {
        None
    }
}
