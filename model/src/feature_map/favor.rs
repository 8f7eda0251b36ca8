//! FAVOR+: exponentials of random projections, the kernel of softmax attention.

use candle_core::{Result, Tensor};

use super::matrices::RandomMatrices;
use crate::kernels::Isa;
use crate::kernels::positive;

/// The positive map of every head (Choromanski et al., 2021, equation 7): `y = x d^(-1/4)`,
/// `phi(x) = sqrt(1/D) exp(W y - |y|^2 / 2 - m)`; F = D.
///
/// Without m `phi(q) . phi(k)` estimates `exp(q . k / sqrt(d))`. Here m is each row's own greatest exponent, `max(W y) -
/// |y|^2 / 2`, so that the greatest feature of every row is `sqrt(1/D)`: a query's cancels in the normaliser, a key's is
/// handed on to whoever adds keys together. Published FAVOR+ takes the maximum over `W y` alone, which of a long key is
/// far above its exponents: its features vanish, and those of all keys with the same maximum. It adds 1e-6 to every
/// feature for that reason; here nothing is added.
#[derive(Debug)]
pub struct FavorFeatures {
    w: RandomMatrices,  // (heads, D, d)
    scale: f32,         // d^(-1/4)
    greatest: Vec<f32>, // what no maximum is above: (heads)
}

impl FavorFeatures {
    /// random_matrices: (heads, D, d), drawn when the model was made: blocks of d orthogonal rows whose norms are
    /// distributed as chi(d), or are all sqrt(d).
    ///
    /// # Errors
    /// When the tensor has not three dimensions, or one of them is 0.
    pub fn new(random_matrices: &Tensor) -> Result<Self> {
        let w = RandomMatrices::new(random_matrices)?;
        let scale = (w.dims().2 as f32).sqrt().sqrt().recip();
        let halves = (random_matrices.sqr()?.sum(2)? * 0.5)?;
        // What projections in f32 may be off by is far less.
        let greatest = halves.max(1)?.affine(1.001, 0.001)?.to_vec1()?;
        Ok(Self { w, scale, greatest })
    }

    /// What no key's maximum is above, whatever the key, with room for rounding: `w . y - |y|^2 / 2` is at most
    /// `|w|^2 / 2`. (heads)
    pub(super) fn greatest(&self) -> &[f32] {
        &self.greatest
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
