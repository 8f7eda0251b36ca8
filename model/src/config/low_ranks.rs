//! The ranks of RWKV-7's low-rank maps.

use serde::{Deserialize, Serialize};

/// The ranks of the low-rank maps that compute vectors from a token's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LowRanks {
    /// Rank of the decay (w).
    pub decay: usize,
    /// Rank of the in-context learning rate (a).
    pub a: usize,
    /// Rank of the share of the first layer's values (v).
    pub v: usize,
    /// Rank of the gate (g).
    pub gate: usize,
}
