//! Text and token ids: encoding, incremental decoding, and stop strings.
//!
//! Nothing here knows the model, the engine or HTTP.

mod detokenizer;
mod stop;
mod tokenizer;
mod vocabulary;

pub use detokenizer::Detokenizer;
pub use stop::{MAX_STOP_STRINGS, StopError, StopMatcher, StopStrings};
pub use tokenizer::{GenerationDefaults, TextError, Tokenizer};
pub use vocabulary::Vocabulary;
