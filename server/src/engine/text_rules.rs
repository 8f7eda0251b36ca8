//! The text data and functions that the engine needs.

use std::sync::Arc;

use crate::text::{Encode, Vocabulary};

/// The text data and functions that the engine needs.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: Arc<[u32]>,
    /// Encodes a piece of text as tokens.
    pub encode: Encode,
}
