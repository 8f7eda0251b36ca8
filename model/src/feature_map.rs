//! Feature maps: how a query or key becomes features whose products estimate a positive kernel.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use crate::kernels::{Isa, matmul, trigonometry};
use crate::nn::floats;

/// The Gaussian map of every head (equation 2 of Peng et al., 2021):
/// `phi(x) = sqrt(1/D) [sin(W x^), cos(W x^)]` with `x^ = x / (|x| + 1e-3)` and `W = sigma . W~`.
///
/// `phi(x) . phi(y)` estimates `exp(-|sigma . (x^ - y^)|^2 / 2)`, with an error that falls like 1/sqrt(D).
#[derive(Clone, Debug)]
pub struct GaussianFeatures {
    w: Tensor, // (heads, D, d), f32, contiguous
}

impl GaussianFeatures {
    /// random_matrices: (heads, D, d), drawn from N(0, 1) when the model was made; sigma: (heads, d).
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn new(random_matrices: &Tensor, sigma: &Tensor) -> Result<Self> {
        let w = random_matrices.broadcast_mul(&sigma.unsqueeze(1)?)?.contiguous()?;
        w.dims3()?;
        Ok(Self { w })
    }

    /// W with sigma already in it: (heads, D, d).
    pub(crate) fn w(&self) -> &Tensor {
        &self.w
    }

    /// x: (batch, heads, time, d) f32, of any length -> phi (batch, heads, time, 2D).
    ///
    /// # Errors
    /// When `x` has other heads or another width than W.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.contiguous()?.apply_op2_no_bwd(&self.w, &GaussianOp)
    }
}

/// The features of one head's rows, on slices: the part that prefill and decoding share.
///
/// x: (rows, d), made unit length in place; w: (D, d); angles: scratch (rows, D); out: (rows, 2D).
pub(crate) fn gaussian_rows(x: &mut [f32], w: &[f32], d: usize, angles: &mut [f32], out: &mut [f32]) {
    let isa = Isa::detect();
    trigonometry::unit(isa, x, d);
    matmul::matmul_nt(x, matmul::Weights::F32(w), d, angles);
    trigonometry::features(isa, angles, w.len() / d, out);
}

struct GaussianOp;

impl CustomOp2 for GaussianOp {
    fn name(&self) -> &'static str {
        "gaussian-features"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((batch, heads, time, d), (w_heads, proj_dim, w_d)) = (xl.shape().dims4()?, wl.shape().dims3()?);
        if (heads, d) != (w_heads, w_d) {
            bail!("gaussian-features: x has {heads} heads of {d}, the random matrices {w_heads} of {w_d}");
        }
        let mut x = floats(x, xl, "gaussian-features: x")?.to_vec();
        let w = floats(w, wl, "gaussian-features: random matrices")?;
        let mut angles = vec![0.0; time * proj_dim];
        let mut out = vec![0.0; batch * heads * time * 2 * proj_dim];
        let rows = x.chunks_exact_mut(time * d).zip(out.chunks_exact_mut(time * 2 * proj_dim));
        for (i, (x, out)) in rows.enumerate() {
            let head = i % heads;
            gaussian_rows(x, &w[head * proj_dim * d..][..proj_dim * d], d, &mut angles, out);
        }
        Ok((CpuStorage::F32(out), (batch, heads, time, 2 * proj_dim).into()))
    }
}
