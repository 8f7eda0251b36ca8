//! Compiled grammars as the engine asks of them.

use tidegate_model::sampling::TokenSet;

use super::constraint::{Constraint, ConstraintError, Grammar};
use crate::text::{CompiledGrammar, GrammarMatcher};

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

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.accept(token).map_err(ConstraintError::new)
    }

    fn is_complete(&self) -> bool {
        self.is_complete()
    }
}
