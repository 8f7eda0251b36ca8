//! What the engine knows about text.

use std::sync::Arc;

use crate::text::Vocabulary;

/// From a piece of text to its tokens.
pub type Encode = Arc<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// What the engine knows about text.
pub struct TextRules {
    /// The bytes of each token.
    pub vocabulary: Arc<Vocabulary>,
    /// Tokens that end a text.
    pub eos: Arc<[u32]>,
    /// The tokens of a piece of text.
    pub encode: Encode,
}
