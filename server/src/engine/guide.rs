//! Holds one text to its grammar. The mask of the next token is computed while the model steps.

use std::sync::Arc;

use tidegate_model::sampling::TokenSet;

use super::constraint::{Constraint, ConstraintError, Grammar};
use super::error::{SequenceError, catch_panic};

/// One text and its grammar.
#[derive(Debug)]
pub(super) struct Guide {
    grammar: Arc<dyn Grammar>,
    /// `None` until the first mask.
    constraint: Option<Box<dyn Constraint>>,
    allowed: TokenSet,
    /// Whether the last token was the only one that was allowed.
    was_forced: bool,
    /// Whether `allowed` is valid for the next token, or why it could not be computed; `None` if it is not computed yet.
    mask: Option<Result<(), SequenceError>>,
}

impl Guide {
    pub(super) fn new(grammar: Arc<dyn Grammar>, vocab_size: usize) -> Self {
        Self { grammar, constraint: None, allowed: TokenSet::new(vocab_size), was_forced: false, mask: None }
    }

    /// Computes the mask of the next token, which depends only on the tokens before it. [`Self::allowed`] reports errors.
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

    /// The token that must come next, if the one before it had to come too: computes the mask then. After any other token
    /// the mask is computed during the model's step.
    pub(super) fn next_forced(&mut self) -> Option<u32> {
        if self.was_forced {
            self.compute_mask();
        }
        self.forced()
    }

    /// The only token that may come next, if the mask is computed and allows just one.
    fn forced(&self) -> Option<u32> {
        self.mask.as_ref()?.as_ref().ok()?;
        self.allowed.only()
    }

    /// Whether the last mask allows `token`.
    pub(super) fn allows(&self, token: u32) -> bool {
        self.allowed.contains(token)
    }

    /// Accepts the sampled token; whether the text is complete with it.
    ///
    /// # Errors
    /// The grammar does not allow the token.
    pub(super) fn accept(&mut self, token: u32) -> Result<bool, SequenceError> {
        self.was_forced = self.forced() == Some(token);
        self.mask = None;
        let constraint = self.constraint.as_mut();
        let constraint = constraint.ok_or_else(|| SequenceError::internal("grammar: its mask was not computed"))?;
        constraint.accept(token)?;
        Ok(constraint.is_complete())
    }
}
