//! `elu(x) + 1`: features without random vectors.

use crate::kernels::{Isa, positive};

/// The map of Katharopoulos et al. (2020, equation 7): element-wise `phi(x) = x + 1` for x > 0, else `exp(x)`, on
/// queries and keys without normalization; F = d.
#[derive(Clone, Copy, Debug)]
pub struct EluFeatures {
    heads: usize,
    head_dim: usize,
}

impl EluFeatures {
    /// A map for `heads` heads whose queries and keys have `head_dim` (d) elements.
    pub fn new(heads: usize, head_dim: usize) -> Self {
        Self { heads, head_dim }
    }

    /// (heads, F, d)
    pub(super) fn dims(&self) -> (usize, usize, usize) {
        (self.heads, self.head_dim, self.head_dim)
    }

    /// x, out: (rows, d)
    #[allow(clippy::unused_self, reason = "as the other maps")]
    pub(super) fn rows(&self, isa: Isa, x: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
        positive::elu(isa, out);
    }
}
