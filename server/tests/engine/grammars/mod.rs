//! Grammars on the shipped vocabulary, without a model: whatever tokens are drawn, what comes out follows; and what asks
//! too much is refused in time.

mod bombs;
mod cost;
mod drawn;
mod schema;
