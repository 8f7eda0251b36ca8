//! Converts between text and token ids: chat templates, encoding, incremental decoding, stop strings, and grammars.
//!
//! Nothing here knows about the model, the engine or HTTP.

mod bounded;
mod byte_pairs;
mod chat;
mod detokenizer;
mod diff;
mod encoder;
mod error;
mod grammar;
mod pieces;
mod reasoning;
mod score_merges;
mod scored_pieces;
mod sentence_pieces;
mod split;
mod stop;
mod tokenizer;
mod tokenizer_json;
mod trie;
mod vocabulary;
mod world;
mod world_file;

pub use bounded::Around;
pub use byte_pairs::BytePairs;
pub use chat::{
    After, ChatError, ChatTemplate, Message, TOOL_TEMPLATE, TemplateInput, TemplateSource, TemplateSources,
};
pub use detokenizer::Detokenizer;
pub use diff::{Edit, MAX_DIFF_WORDS, TooDifferent, diff};
pub use encoder::{Encode, Pace};
pub use error::TextError;
pub use grammar::{
    Call, Calls, CompiledGrammar, GrammarError, GrammarMatcher, GrammarSpec, Grammars, HelperCommand, Instead,
    MAX_CHOICES, MAX_COMPILERS, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH, OffGrammar, compile_grammars,
};
pub use reasoning::{REASONING_CLOSES, REASONING_OPENS, ReasoningStart};
pub use scored_pieces::{ScoredPiece, ScoredPieces};
pub use stop::{MAX_STOP_STRINGS, StopError, StopMatcher, StopStrings};
pub use tokenizer::{GenerationDefaults, Tokenizer, tokenizer_file};
pub use vocabulary::Vocabulary;
pub use world::{EntryError, WorldError, WorldTokenizer};
pub use world_file::of_file as vocabulary_of_file;
