//! Makes one text follow its grammar. The mask of the next token is computed while the model makes its step.

use std::sync::Arc;

use tidegate_model::sampling::TokenSet;

use super::constraint::{Constraint, ConstraintError, Grammar};
use super::error::{SequenceError, catch_panic};

/// One text and its grammar.
#[derive(Debug)]
pub(super) struct Guide {
    grammar: Arc<dyn Grammar>,
    /// `None` until the first mask or token.
    constraint: Option<Box<dyn Constraint>>,
    allowed: TokenSet,
    /// Whether `allowed` is valid for the next token, or why it could not be computed; `None` if it has not been
    /// computed yet.
    mask: Option<Result<(), SequenceError>>,
}

impl Guide {
    pub(super) fn new(grammar: Arc<dyn Grammar>, vocab_size: usize) -> Self {
        Self { grammar, constraint: None, allowed: TokenSet::new(vocab_size), mask: None }
    }

    /// Computes the mask of the next token, which depends only on the tokens before it. [`Self::allowed`] reports its
    /// errors.
    pub(super) fn compute_mask(&mut self) {
        if self.mask.is_none() {
            let Self { grammar, constraint, allowed, .. } = self;
            self.mask = Some(catch_panic(|| constraint.get_or_insert_with(|| grammar.start()).mask(allowed)));
        }
    }

    /// The tokens that may come next.
    ///
    /// # Errors
    /// There is no mask, or it allows no token.
    pub(super) fn allowed(&self) -> Result<&TokenSet, SequenceError> {
        self.mask.clone().unwrap_or_else(|| Err(SequenceError::internal("grammar: its mask was not computed")))?;
        if self.allowed.is_empty() {
            return Err(ConstraintError::new("no token may follow, and the text may not end").into());
        }
        Ok(&self.allowed)
    }

    /// Returns the token that must come next, if the grammar knows it without computing a mask. Masks take time, so
    /// they are computed during the model's step.
    pub(super) fn next_forced(&self) -> Option<u32> {
        self.constraint.as_ref()?.forced()
    }

    /// Whether the last mask allows `token`.
    pub(super) fn allows(&self, token: u32) -> bool {
        self.allowed.contains(token)
    }

    /// Accepts the next token, and returns whether it completes the text.
    ///
    /// # Errors
    /// The grammar does not allow the token.
    pub(super) fn accept(&mut self, token: u32) -> Result<bool, SequenceError> {
        self.mask = None;
        let Self { grammar, constraint, .. } = self;
        let constraint = constraint.get_or_insert_with(|| grammar.start());
        constraint.accept(token)?;
        Ok(constraint.is_complete())
    }
}
