//! What a kind of tokenizer provides: the ids of texts, and the names of tokens.

use std::sync::Arc;

use super::error::TextError;

/// From a piece of text to its tokens.
pub type Encode = Arc<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// How far a text is encoded.
pub struct Pace<'a> {
    /// Most tokens. Encoding ends soon after as many; a result may still have more.
    pub most: usize,
    /// Called after each piece but the last.
    pub pause: &'a mut dyn FnMut(),
}

/// The ids of a text that was encoded in pieces, and the special tokens that belong around it.
pub(super) struct Encoded<'a> {
    pub(super) ids: Vec<u32>,
    pub(super) before: &'a [u32],
    pub(super) after: &'a [u32],
}

/// A kind of tokenizer. In plain encodings, the text of a special token is text like any other; in the others it becomes that
/// token.
pub(super) trait Encoder: Send + Sync {
    /// The ids of `text`; with `whole`, those of the special tokens around it too.
    fn encode(&self, text: &str, whole: bool, plain: bool) -> Result<Vec<u32>, TextError>;

    /// The ids of `text`, read in pieces of about `target` bytes; `None` if it is short enough to be encoded at once.
    fn encode_in_pieces(
        &self,
        text: &str,
        plain: bool,
        pace: &mut Pace<'_>,
        target: usize,
    ) -> Result<Option<Encoded<'_>>, TextError>;

    /// The same for texts that continue another. Some tokenizers treat the beginning of a text in a way of its own.
    fn more(&self) -> &dyn Encoder;

    /// The text of a special token; `None` for other tokens.
    fn special(&self, id: u32) -> Option<&str>;

    /// The token's name in the vocabulary, in the tokenizer's own alphabet; `None` if its bytes are its name.
    fn name(&self, id: u32) -> Option<String>;

    /// The token whose text this is.
    fn id(&self, text: &str) -> Option<u32>;

    /// For RWKV's kind the text of the special token between two texts, which may be empty; `None` for others.
    fn world_separator(&self) -> Option<&str> {
        None
    }
}
