//! What the engine needs from a language model, and nothing about how one works.

/// Why a model could not do a step.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ModelError(String);

impl ModelError {
    /// An error with the words of `reason`.
    pub fn new(reason: impl std::fmt::Display) -> Self {
        Self(reason.to_string())
    }
}

/// A model with a fixed number of slots, each holding the state of one conversation.
pub trait LanguageModel: Send {
    /// Tokens in the vocabulary: the length of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Conversations that can be held at once.
    fn slots(&self) -> usize;

    /// Empties a slot.
    ///
    /// # Errors
    /// The device failed.
    fn reset(&mut self, slot: usize) -> Result<(), ModelError>;

    /// Reads `ids` (at least one) into a slot without computing logits.
    ///
    /// # Errors
    /// The device failed.
    fn absorb(&mut self, ids: &[u32], slot: usize) -> Result<(), ModelError>;

    /// Reads `ids` (at least one) into a slot; the logits after the last of them, (vocab).
    ///
    /// # Errors
    /// The device failed.
    fn prefill(&mut self, ids: &[u32], slot: usize) -> Result<Vec<f32>, ModelError>;

    /// Reads one token into each of `slots`, which are distinct; logits (rows, vocab), row by row.
    ///
    /// # Errors
    /// The device failed.
    fn decode(&mut self, ids: &[u32], slots: &[usize]) -> Result<Vec<f32>, ModelError>;
}
