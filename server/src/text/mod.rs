//! Text and token ids: chat templates, encoding, incremental decoding, and stop strings.
//!
//! Nothing here knows about the model, the engine or HTTP.

mod chat;
mod detokenizer;
mod grammar;
mod pieces;
mod stop;
mod tokenizer;
mod vocabulary;

pub use chat::{After, ChatError, ChatTemplate, Message};
pub use detokenizer::Detokenizer;
pub use grammar::{
    Call, Calls, CompiledGrammar, GrammarError, GrammarMatcher, GrammarSpec, Grammars, MAX_CHOICES, MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH, OffGrammar,
};
pub use stop::{MAX_STOP_STRINGS, StopError, StopMatcher, StopStrings};
pub use tokenizer::{GenerationDefaults, TextError, Tokenizer};
pub use vocabulary::Vocabulary;
