//! The shape of Mamba-2's layers, besides what they share with other families.

use serde::{Deserialize, Serialize};

/// The keys that only Mamba-2 has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateSpace {
    /// Length of B and C (N): rows of a head's memory.
    pub state_size: usize,
    /// Groups of heads, each of which shares B and C.
    pub n_groups: usize,
    /// Groups of channels, each of which the gated norm treats on its own.
    pub norm_groups: usize,
    /// The least and the largest step of time (dt); no largest one if it is `None`.
    pub time_step_limit: (f64, Option<f64>),
    /// Whether the projections have biases.
    pub use_bias: bool,
    /// Whether the convolution has one.
    pub use_conv_bias: bool,
}

impl StateSpace {
    /// The largest step of time; infinite without a limit.
    pub(crate) fn greatest_step(&self) -> f64 {
        self.time_step_limit.1.unwrap_or(f64::INFINITY)
    }

    /// Channels of the convolution (x, B, C), for a layer of so many channels (x).
    pub(crate) fn channels(&self, inner: usize) -> usize {
        inner + 2 * self.n_groups * self.state_size
    }
}
