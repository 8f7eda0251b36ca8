//! What the engine asks of a grammar: which tokens may come next. It knows no grammar itself.

use std::fmt::Debug;

use tidegate_model::sampling::TokenSet;

/// Why a text cannot follow its grammar any further; its words are for the log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(String);

impl ConstraintError {
    /// An error with the words of `reason`.
    pub fn new(reason: impl std::fmt::Display) -> Self {
        Self(reason.to_string())
    }
}

/// A grammar that has been compiled, for any number of texts.
pub trait Grammar: Debug + Send + Sync {
    /// The beginning of one text.
    fn start(&self) -> Box<dyn Constraint>;
}

/// How far one text has come in its grammar.
pub trait Constraint: Debug + Send {
    /// Makes `allowed` the tokens that may come next, an end-of-text token among them where the text may end here.
    ///
    /// # Errors
    /// The grammar is more than its limits allow.
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError>;

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// The token is not allowed here, or the grammar is more than its limits allow.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether the text is whole and nothing but its end can follow.
    fn is_complete(&self) -> bool;
}
