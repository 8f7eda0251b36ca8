//! The recurrence of random feature attention in three forms that agree: `naive` (the truth), `chunk` (many
//! tokens), `recurrent` (one token per row, in place).
//!
//! Knows features, values, gates and memories of heads; no projections, configs or checkpoints.

pub mod chunk;
pub(crate) mod conv;
pub mod naive;
pub mod recurrent;
