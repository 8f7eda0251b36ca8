//! Feature maps: how a query or key becomes features whose products estimate a positive kernel.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

use crate::kernels::panels::Output;
use crate::kernels::{Isa, float, trigonometry};
use crate::nn::floats;

/// The Gaussian map of every head (equation 2 of Peng et al., 2021):
/// `phi(x) = sqrt(1/D) [sin(W x^), cos(W x^)]` with `x^ = x / (|x| + 1e-3)` and `W = sigma . W~`.
///
/// `phi(x) . phi(y)` estimates `exp(-|sigma . (x^ - y^)|^2 / 2)`, with an error that falls like 1/sqrt(D).
#[derive(Debug)]
pub struct GaussianFeatures {
    heads: Vec<float::Packed>, // W of each head, sigma in it: (D, d), f32
}

impl GaussianFeatures {
    /// random_matrices: (heads, D, d), drawn from N(0, 1) when the model was made; sigma: (heads, d).
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn new(random_matrices: &Tensor, sigma: &Tensor) -> Result<Self> {
        let w = random_matrices.broadcast_mul(&sigma.unsqueeze(1)?)?;
        let (_, proj_dim, d) = w.dims3()?;
        let w: Vec<f32> = w.flatten_all()?.to_vec1()?;
        let pack = |w| float::Packed::of_f32(w, d);
        Ok(Self { heads: w.chunks_exact(proj_dim * d).map(pack).collect() })
    }

    /// (heads, D, d)
    pub(crate) fn dims(&self) -> (usize, usize, usize) {
        let (proj_dim, d) = self.heads.first().map_or((0, 0), |w| (w.rows(), w.columns()));
        (self.heads.len(), proj_dim, d)
    }

    /// Bytes of the matrices.
    pub(crate) fn bytes(&self) -> usize {
        self.heads.iter().map(float::Packed::bytes).sum()
    }

    /// The features of one head's rows: the part that all forms share.
    ///
    /// x: (rows, d), made unit length in place; angles: scratch (rows, D); out: (rows, 2D).
    pub(crate) fn rows(&self, isa: Isa, head: usize, x: &mut [f32], angles: &mut [f32], out: &mut [f32]) {
        let w = &self.heads[head];
        trigonometry::unit(isa, x, w.columns());
        float::product(isa, x, w, Output::new(angles, w.rows()));
        trigonometry::features(isa, angles, w.rows(), out);
    }

    /// x: (batch, heads, time, d) f32, of any length -> phi (batch, heads, time, 2D).
    ///
    /// # Errors
    /// When `x` has other heads or another width than W.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op1_no_bwd(&GaussianOp(self))
    }
}

struct GaussianOp<'a>(&'a GaussianFeatures);

impl CustomOp1 for GaussianOp<'_> {
    fn name(&self) -> &'static str {
        "gaussian-features"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((batch, heads, time, d), (w_heads, proj_dim, w_d)) = (xl.shape().dims4()?, self.0.dims());
        if (heads, d) != (w_heads, w_d) {
            bail!("gaussian-features: x has {heads} heads of {d}, the random matrices {w_heads} of {w_d}");
        }
        let mut x = floats(x, xl, "gaussian-features: x")?.to_vec();
        let mut angles = vec![0.0; time * proj_dim];
        let mut out = vec![0.0; batch * heads * time * 2 * proj_dim];
        let rows = x.chunks_exact_mut(time * d).zip(out.chunks_exact_mut(time * 2 * proj_dim));
        for (i, (x, out)) in rows.enumerate() {
            self.0.rows(Isa::detect(), i % heads, x, &mut angles, out);
        }
        Ok((CpuStorage::F32(out), (batch, heads, time, 2 * proj_dim).into()))
    }
}
