//! Grammars on the shipped vocabulary, without a model. Random allowed tokens form texts that follow the grammar, and
//! grammars that exceed the limits are refused in time.

mod bombs;
mod cost;
mod drawn;
mod helper;
mod schema;
