//! Grammars on the shipped vocabulary, without a model: random allowed tokens give texts that follow the grammar, and
//! grammars over the limits are refused in time.

mod bombs;
mod cost;
mod drawn;
mod helper;
mod schema;
