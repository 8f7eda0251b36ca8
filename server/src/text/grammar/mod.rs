//! Grammars that answers must follow.

mod build;
mod calls;
mod check;
mod compiler;
mod lark;
mod matcher;
mod schema;
mod spec;

pub use calls::{Call, Calls};
pub use compiler::Grammars;
pub use matcher::{CompiledGrammar, GrammarMatcher, OffGrammar};
pub use spec::{GrammarError, GrammarSpec, MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH};
