//! Rectified random projections: the arc-cosine kernel.

use candle_core::Tensor;

use super::matrices::RandomMatrices;
use crate::error::Result;
use crate::kernels::{Isa, positive, trigonometry};

/// The arc-cosine map of all heads (Peng et al., 2021, appendix A; the order-1 kernel of Cho and Saul, 2009):
/// `phi(x) = sqrt(1/D) ReLU(W x^)` with `x^ = x / (|x| + 1e-3)` and `W = sigma . W~`; F = D.
///
/// `phi(x) . phi(y)` estimates `|a| |b| (sin t + (pi - t) cos t) / (2 pi)` for `a = sigma . x^`, `b = sigma . y^` and
/// the angle t between them.
#[derive(Debug)]
pub struct ArcCosineFeatures {
    w: RandomMatrices, // sigma in it: (heads, D, d)
}

impl ArcCosineFeatures {
    /// random_matrices: (heads, D, d), drawn from N(0, 1) when the model was created; sigma: (heads, d).
    ///
    /// # Errors
    /// When the shapes do not fit, or a dimension is 0.
    pub fn new(random_matrices: &Tensor, sigma: &Tensor) -> Result<Self> {
        Ok(Self { w: RandomMatrices::with_sigma(random_matrices, sigma)? })
    }

    /// (heads, F, d)
    pub(super) fn dims(&self) -> (usize, usize, usize) {
        self.w.dims()
    }

    pub(super) fn bytes(&self) -> usize {
        self.w.bytes()
    }

    /// x: (rows, d), normalized to unit length in place; out: (rows, D).
    pub(super) fn rows(&self, isa: Isa, head: usize, x: &mut [f32], out: &mut [f32]) {
        let (_, proj_dim, d) = self.w.dims();
        trigonometry::unit(isa, x, d);
        self.w.project(isa, head, x, out);
        positive::rectified(isa, out, proj_dim);
    }
}
