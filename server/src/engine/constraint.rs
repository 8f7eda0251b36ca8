//! The engine's interface to a grammar, which says which tokens may come next. The compiled grammars of `text`
//! implement it.

use std::fmt::Debug;

use tidegate_model::sampling::TokenSet;

use crate::text::{CompiledGrammar, GrammarMatcher};

/// Why a text cannot follow its grammar any further. Goes to the log.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(String);

impl ConstraintError {
    /// An error with this message.
    pub fn new(reason: impl std::fmt::Display) -> Self {
        Self(reason.to_string())
    }
}

/// A compiled grammar, which any number of texts can follow.
pub trait Grammar: Debug + Send + Sync {
    /// Starts a text.
    fn start(&self) -> Box<dyn Constraint>;
}

/// The position of one text in its grammar.
pub trait Constraint: Debug + Send {
    /// Sets `allowed` to the tokens that may come next, including an end-of-text token where the text may end.
    ///
    /// # Errors
    /// The grammar exceeds its limits.
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError>;

    /// Returns the token that must come next, if an earlier mask has shown it. Must return at once.
    fn forced(&self) -> Option<u32> {
        None
    }

    /// Accepts the sampled token.
    ///
    /// # Errors
    /// The token is not allowed here, or the grammar exceeds its limits.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether the text is complete: only its end can follow.
    fn is_complete(&self) -> bool;
}

impl Grammar for CompiledGrammar {
    fn start(&self) -> Box<dyn Constraint> {
        Box::new(self.start())
    }
}

impl Constraint for GrammarMatcher {
    fn mask(&mut self, allowed: &mut TokenSet) -> Result<(), ConstraintError> {
        allowed.copy_from(&self.mask().map_err(ConstraintError::new)?);
        Ok(())
    }

    fn forced(&self) -> Option<u32> {
        self.forced()
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.accept(token).map_err(ConstraintError::new)
    }

    fn is_complete(&self) -> bool {
        self.is_complete()
    }
}
