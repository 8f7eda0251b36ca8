//! What the engine knows about text.

use std::sync::Arc;

use crate::text::{Encode, Vocabulary};

/// What the engine knows about text.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: Arc<[u32]>,
    /// The tokens of a piece of text.
    pub encode: Encode,
}
