//! The random matrices of a layer's heads, and their products with rows of inputs.

use candle_core::Tensor;

use crate::error::{ModelError, Result};
use crate::kernels::{Isa, float};

/// W of each head: (D, d), f32.
#[derive(Debug)]
pub(super) struct RandomMatrices(Vec<float::Packed>);

impl RandomMatrices {
    /// w: (heads, D, d), each at least 1.
    pub(super) fn new(w: &Tensor) -> Result<Self> {
        let (heads, proj_dim, d) = w.dims3()?;
        if heads * proj_dim * d == 0 {
            return Err(ModelError::shape("random matrices", "heads, D and d", "at least 1", w.dims()));
        }
        let w: Vec<f32> = w.flatten_all()?.to_vec1()?;
        let pack = |w| float::Packed::of_f32(w, d);
        Ok(Self(w.chunks_exact(proj_dim * d).map(pack).collect()))
    }

    /// Like [`Self::new`], for `sigma . w`. sigma: (heads, d)
    pub(super) fn with_sigma(w: &Tensor, sigma: &Tensor) -> Result<Self> {
        Self::new(&w.broadcast_mul(&sigma.unsqueeze(1)?)?)
    }

    /// (heads, D, d)
    pub(super) fn dims(&self) -> (usize, usize, usize) {
        let (proj_dim, d) = self.0.first().map_or((0, 0), |w| (w.rows(), w.columns()));
        (self.0.len(), proj_dim, d)
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.iter().map(float::Packed::bytes).sum()
    }

    /// Computes `W x` for rows of one head. x: (rows, d), out: (rows, D)
    pub(super) fn project(&self, isa: Isa, head: usize, x: &[f32], out: &mut [f32]) {
        float::product(isa, x, &self.0[head], out);
    }
}
