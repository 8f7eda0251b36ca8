//! Text and token ids: chat templates, encoding, incremental decoding, and stop strings.
//!
//! Nothing here knows the model, the engine or HTTP.

mod chat;
mod detokenizer;
mod pieces;
mod stop;
mod tokenizer;
mod vocabulary;

pub use chat::{After, ChatError, ChatTemplate, Message};
pub use detokenizer::Detokenizer;
pub use pieces::Span;
pub use stop::{MAX_STOP_STRINGS, StopError, StopMatcher, StopStrings};
pub use tokenizer::{GenerationDefaults, TextError, Tokenizer};
pub use vocabulary::Vocabulary;
