//! FAVOR+: exponentials of random projections, which approximate the kernel of softmax attention.

use candle_core::Tensor;

use super::matrices::RandomMatrices;
use crate::error::Result;
use crate::kernels::Isa;
use crate::kernels::positive;

/// The positive map of all heads (Choromanski et al., 2021, equation 7): `y = x d^(-1/4)`,
/// `phi(x) = sqrt(1/D) exp(W y - |y|^2 / 2 - m)`; F = D.
///
/// Without m, `phi(q) . phi(k)` estimates `exp(q . k / sqrt(d))`. Here m is the largest exponent of each row,
/// `max(W y) - |y|^2 / 2`, so the largest feature of every row is `sqrt(1/D)`. The m of a query cancels in the
/// normalizer; the m of a key is returned, because sums over keys need it. Published FAVOR+ takes the maximum over
/// `W y` alone. For a long key that is far above its exponents, so its features vanish, which is why 1e-6 is added to
/// every feature there. Here nothing is added.
#[derive(Debug)]
pub struct FavorFeatures {
    w: RandomMatrices,         // (heads, D, d)
    scale: f32,                // d^(-1/4)
    greatest_maxima: Vec<f32>, // (heads)
}

impl FavorFeatures {
    /// random_matrices: (heads, D, d), drawn when the model was created: blocks of d orthogonal rows whose norms are
    /// distributed as chi(d), or all equal sqrt(d).
    ///
    /// # Errors
    /// When the tensor does not have three dimensions, or one of them is 0.
    pub fn new(random_matrices: &Tensor) -> Result<Self> {
        let w = RandomMatrices::new(random_matrices)?;
        let scale = (w.dims().2 as f32).sqrt().sqrt().recip();
        let halves = (random_matrices.sqr()?.sum(2)? * 0.5)?;
        // This margin is far larger than the error of projections in f32.
        let greatest_maxima = halves.max(1)?.affine(1.001, 0.001)?.to_vec1()?;
        Ok(Self { w, scale, greatest_maxima })
    }

    /// The upper bound of each head's key maximum, with a margin for rounding: `w . y - |y|^2 / 2` is at most
    /// `|w|^2 / 2`. (heads)
    pub(super) fn greatest_maxima(&self) -> &[f32] {
        &self.greatest_maxima
    }

    /// (heads, F, d)
    pub(super) fn dims(&self) -> (usize, usize, usize) {
        self.w.dims()
    }

    pub(super) fn bytes(&self) -> usize {
        self.w.bytes()
    }

    /// x: (rows, d), scaled in place -> out: (rows, D), relative to maxima: (rows).
    pub(super) fn rows(&self, isa: Isa, head: usize, x: &mut [f32], out: &mut [f32], maxima: &mut [f32]) {
        positive::scaled(isa, x, self.scale);
        self.w.project(isa, head, x, out);
        positive::favor(isa, x, out, maxima);
    }
}
