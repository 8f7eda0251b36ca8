//! The shape of Mamba-2's layers, except for the keys shared with other families.

use serde::{Deserialize, Serialize};

/// The keys that only Mamba-2 has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpace {
    /// Length of B and C (N): the number of rows of a head's memory.
    pub state_size: usize,
    /// Number of groups of heads; the heads of a group share B and C.
    pub n_groups: usize,
    /// Number of groups of channels that the gated norm normalizes separately.
    pub norm_groups: usize,
    /// The minimum and maximum time step (dt); `None` for no maximum.
    pub time_step_limit: (f64, Option<f64>),
    /// Whether the projections have biases.
    pub use_bias: bool,
    /// Whether the convolution has a bias.
    pub use_conv_bias: bool,
}

impl StateSpace {
    /// The maximum time step; infinite if there is no limit.
    pub(crate) fn greatest_step(&self) -> f64 {
        self.time_step_limit.1.unwrap_or(f64::INFINITY)
    }

    /// Number of convolution channels (x, B, C) for a layer with `inner` channels of x.
    pub(crate) fn channels(&self, inner: usize) -> usize {
        inner + 2 * self.n_groups * self.state_size
    }
}
