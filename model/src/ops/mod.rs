//! The recurrence of random feature attention in three forms that agree: `naive` (the truth), `chunk` (many
//! tokens), `recurrent` (one token per row, in place); `softmax`, attention to a cache of keys and values, which
//! the recurrence is measured against; `hybrid`, which is both in one normaliser; and `cross`, queries over what stays as
//! it is.
//!
//! Knows features, values, gates and memories of heads; no projections, configs or checkpoints.

pub mod chunk;
pub(crate) mod conv;
pub(crate) mod cross;
pub mod hybrid;
pub mod naive;
pub mod recurrent;
pub mod softmax;
