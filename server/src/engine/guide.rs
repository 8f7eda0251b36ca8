//! One text and its grammar: the mask of the next token is made while the model steps, and laid over its logits, or
//! handed to who has them.

use tidegate_model::sampling::TokenSet;

use super::constraint::{Constraint, ConstraintError, Grammar};
use super::guarded::{Fault, guarded};

/// Holds one text to its grammar.
#[derive(Debug)]
pub(super) struct Guide {
    constraint: Box<dyn Constraint>,
    allowed: TokenSet,
    /// Whether `allowed` is of the next token, or why it could not be made; none where it has yet to be.
    mask: Option<Result<(), Fault>>,
}

impl Guide {
    pub(super) fn new(grammar: &dyn Grammar, vocab_size: usize) -> Self {
        Self { constraint: grammar.start(), allowed: TokenSet::new(vocab_size), mask: None }
    }

    /// Makes the mask of the next token, which depends on those before it alone. What goes wrong is told by
    /// [`Self::allowed`].
    pub(super) fn look_ahead(&mut self) {
        if self.mask.is_none() {
            self.mask = Some(guarded(|| self.constraint.mask(&mut self.allowed)));
        }
    }

    /// The tokens that may come next.
    ///
    /// # Errors
    /// There is no mask, or it allows nothing at all.
    pub(super) fn allowed(&self) -> Result<&TokenSet, Fault> {
        self.mask.clone().unwrap_or_else(|| Err(Fault::internal("grammar: its mask was not made")))?;
        if self.allowed.is_empty() {
            return Err(ConstraintError::new("no token may follow, and the text may not end").into());
        }
        Ok(&self.allowed)
    }

    /// Whether the mask that was made last allows `token`.
    pub(super) fn allows(&self, token: u32) -> bool {
        self.allowed.contains(token)
    }

    /// Takes the token that was chosen; whether the text is whole with it.
    ///
    /// # Errors
    /// The grammar does not go on with it.
    pub(super) fn accept(&mut self, token: u32) -> Result<bool, Fault> {
        self.mask = None;
        self.constraint.accept(token)?;
        Ok(self.constraint.is_complete())
    }
}
