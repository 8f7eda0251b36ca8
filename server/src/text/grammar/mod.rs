//! Grammars that answers must follow.

mod build;
mod cache;
mod calls;
mod check;
mod closing;
mod compiler;
mod helper;
mod helpers;
mod lark;
mod matcher;
mod memory;
mod protocol;
mod reasoning;
mod schema;
mod spec;
mod tokens;

pub use calls::{Call, Calls, Instead};
pub use compiler::Grammars;
pub use helper::compile_grammars;
pub use helpers::HelperCommand;
pub use matcher::{CompiledGrammar, GrammarMatcher, OffGrammar};
pub use spec::{GrammarError, GrammarSpec, MAX_CHOICES, MAX_COMPILERS, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH};
