//! The ranks of RWKV-7's low-rank maps.

use serde::{Deserialize, Serialize};

/// The ranks of the maps that make vectors from a token's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LowRanks {
    /// Of the decay (w).
    pub decay: usize,
    /// Of the learning rate in context (a).
    pub a: usize,
    /// Of the share of the first layer's values (v).
    pub v: usize,
    /// Of the gate (g).
    pub gate: usize,
}
