//! Queries, keys and values, and the softmax that all attentions use.

use candle_core::{D, Result, Tensor, bail};

/// Queries, keys and values with matching shapes.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub(super) q: Tensor, // (batch, heads, queries, d)
    pub(super) k: Tensor, // (batch, heads, keys, d)
    pub(super) v: Tensor, // (batch, heads, keys, width)
}

impl Inputs {
    /// q: (batch, heads, queries, d), k: (batch, heads, keys, d), v: (batch, heads, keys, width), all of the same float
    /// type.
    ///
    /// # Errors
    /// If the shapes or types do not match, or one is empty.
    pub fn new(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        let ((batch, heads, queries, d), (_, _, keys, width)) = (q.dims4()?, v.dims4()?);
        if k.dims() != [batch, heads, keys, d] || v.dims() != [batch, heads, keys, width] {
            bail!("attention: q, k and v do not fit each other: {:?}, {:?}, {:?}", q.dims(), k.dims(), v.dims());
        }
        if q.elem_count() == 0 || v.elem_count() == 0 || queries == 0 {
            bail!("attention: q, k and v must not be empty: {:?}, {:?}", q.dims(), v.dims());
        }
        if q.dtype() != k.dtype() || q.dtype() != v.dtype() || !q.dtype().is_float() {
            bail!("attention: q, k and v must be of one float type: {:?}, {:?}, {:?}", q.dtype(), k.dtype(), v.dtype());
        }
        Ok(Self { q: q.contiguous()?, k: k.contiguous()?, v: v.contiguous()? })
    }

    /// (batch, heads, queries, d)
    pub fn q(&self) -> &Tensor {
        &self.q
    }

    /// (batch, heads, keys, d)
    pub fn k(&self) -> &Tensor {
        &self.k
    }

    /// (batch, heads, keys, width)
    pub fn v(&self) -> &Tensor {
        &self.v
    }

    /// Multiplies q and k by d^(-1/4), so that their products are the exponents of softmax attention.
    ///
    /// # Errors
    /// If the device fails.
    pub fn scaled(&self) -> Result<Self> {
        let scale = (self.q.dim(D::Minus1)? as f64).powf(-0.25);
        Ok(Self { q: (&self.q * scale)?, k: (&self.k * scale)?, v: self.v.clone() })
    }
}

/// Softmax over the last dimension; differentiable.
pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}
