//! FAVOR+: exponentials of random projections, the kernel of softmax attention.

use candle_core::{Result, Tensor};

use super::matrices::RandomMatrices;
use crate::kernels::Isa;
use crate::kernels::positive::{self, Side};

/// The positive map of every head (Choromanski et al., 2021, equation 7): `y = x d^(-1/4)`,
/// `phi(x) = sqrt(1/D) exp(W y - |y|^2 / 2 - m)`; F = D.
///
/// Without m `phi(q) . phi(k)` estimates `exp(q . k / sqrt(d))`. Here m is each row's own greatest projection, so that
/// no feature overflows: a query's cancels in the normaliser, a key's is handed on to whoever adds keys together. A
/// key longer than about `13 d^(1/4)` has features too small for f32.
#[derive(Debug)]
pub struct FavorFeatures {
    w: RandomMatrices, // (heads, D, d)
    scale: f32,        // d^(-1/4)
}

impl FavorFeatures {
    /// random_matrices: (heads, D, d), drawn when the model was made: blocks of d orthogonal rows whose norms are
    /// distributed as chi(d), or are all sqrt(d).
    ///
    /// # Errors
    /// When the tensor has not three dimensions.
    pub fn new(random_matrices: &Tensor) -> Result<Self> {
        let w = RandomMatrices::new(random_matrices)?;
        let scale = (w.dims().2 as f32).sqrt().sqrt().recip();
        Ok(Self { w, scale })
    }

    /// (heads, F, d)
    pub(super) fn dims(&self) -> (usize, usize, usize) {
        self.w.dims()
    }

    pub(super) fn bytes(&self) -> usize {
        self.w.bytes()
    }

    /// x: (rows, d), scaled in place -> out: (rows, D), relative to maxima: (rows).
    pub(super) fn rows(
        &self,
        isa: Isa,
        head: usize,
        (x, side): (&mut [f32], Side),
        out: &mut [f32],
        maxima: &mut [f32],
    ) {
        positive::scaled(isa, x, self.scale);
        self.w.project(isa, head, x, out);
        positive::favor(isa, x, side, out, maxima);
    }
}
