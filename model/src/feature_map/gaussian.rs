//! Sine and cosine of random projections: the Gaussian kernel.

use candle_core::Tensor;

use super::matrices::RandomMatrices;
use crate::error::Result;
use crate::kernels::{Isa, trigonometry};

/// The Gaussian map of all heads (equation 2 of Peng et al., 2021): `phi(x) = sqrt(1/D) [sin(W x^), cos(W x^)]` with
/// `x^ = x / (|x| + 1e-3)` and `W = sigma . W~`; F = 2 D.
///
/// `phi(x) . phi(y)` estimates `exp(-|sigma . (x^ - y^)|^2 / 2)`, with an error that decreases as 1/sqrt(D).
#[derive(Debug)]
pub struct GaussianFeatures {
    w: RandomMatrices, // sigma in it: (heads, D, d)
}

impl GaussianFeatures {
    /// random_matrices: (heads, D, d), drawn from N(0, 1) when the model was created; sigma: (heads, d).
    ///
    /// # Errors
    /// When the shapes do not fit, or a dimension is 0.
    pub fn new(random_matrices: &Tensor, sigma: &Tensor) -> Result<Self> {
        Ok(Self { w: RandomMatrices::with_sigma(random_matrices, sigma)? })
    }

    /// (heads, D, d)
    pub(crate) fn dims(&self) -> (usize, usize, usize) {
        self.w.dims()
    }

    /// Bytes of the matrices.
    pub(crate) fn bytes(&self) -> usize {
        self.w.bytes()
    }

    /// x: (rows, d), normalized to unit length in place; angles: scratch (rows, D); out: (rows, 2D).
    pub(crate) fn rows(&self, isa: Isa, head: usize, x: &mut [f32], angles: &mut [f32], out: &mut [f32]) {
        let (_, proj_dim, d) = self.w.dims();
        trigonometry::unit(isa, x, d);
        self.w.project(isa, head, x, angles);
        trigonometry::features(isa, angles, proj_dim, out);
    }
}
