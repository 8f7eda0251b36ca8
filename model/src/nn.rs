//! Layers without memory: linear, RMSNorm, SwiGLU. Weights stay in their stored dtype; sums are f32.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};
use half::{bf16, f16};

use crate::kernels::{Isa, activation, matmul};

/// The elements of a contiguous f32 tensor on the CPU.
pub(crate) fn floats<'a>(storage: &'a CpuStorage, layout: &Layout, what: &str) -> Result<&'a [f32]> {
    slice(storage.as_slice::<f32>()?, layout, what)
}

fn slice<'a, T>(all: &'a [T], layout: &Layout, what: &str) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&all[start..end]),
        None => bail!("{what} must be contiguous"),
    }
}

/// `x (rows, in) . w (out, in)^T`, one result for every row whatever the other rows are.
struct MatmulNt;

impl CustomOp2 for MatmulNt {
    fn name(&self) -> &'static str {
        "matmul-nt"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, w: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        let ((rows, k), (n, wk)) = (xl.shape().dims2()?, wl.shape().dims2()?);
        if k != wk {
            bail!("matmul-nt: x has {k} columns, the weight {wk}");
        }
        let x = floats(x, xl, "matmul-nt: x")?;
        let weights = match w {
            CpuStorage::F32(w) => matmul::Weights::F32(slice(w, wl, "matmul-nt: weight")?),
            CpuStorage::BF16(w) => matmul::Weights::Bf16(slice::<bf16>(w, wl, "matmul-nt: weight")?),
            CpuStorage::F16(w) => matmul::Weights::F16(slice::<f16>(w, wl, "matmul-nt: weight")?),
            _ => bail!("matmul-nt: weights must be f32, bf16 or f16"),
        };
        let mut out = vec![0.0; rows * n];
        matmul::matmul_nt(x, weights, k, &mut out);
        Ok((CpuStorage::F32(out), (rows, n).into()))
    }
}

/// `y = x W^T + b`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    weight: Tensor,       // (out, in), as stored
    bias: Option<Tensor>, // (out), f32
}

impl Linear {
    /// weight: (out, in) in f32, bf16 or f16; bias: (out).
    pub(crate) fn new(weight: &Tensor, bias: Option<&Tensor>) -> Result<Self> {
        let bias = bias.map(|b| b.to_dtype(DType::F32)).transpose()?;
        Ok(Self { weight: weight.contiguous()?, bias })
    }

    /// Several layers of one input as one: their weights one under another.
    pub(crate) fn stack(weights: &[&Tensor]) -> Result<Self> {
        let mixed = weights.windows(2).any(|pair| pair[0].dtype() != pair[1].dtype());
        let common = |w: &&Tensor| if mixed { w.to_dtype(DType::F32) } else { Ok((*w).clone()) };
        Self::new(&Tensor::cat(&weights.iter().map(common).collect::<Result<Vec<_>>>()?, 0)?, None)
    }

    /// x: (..., in) f32 -> (..., out) f32.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        let Some(last) = shape.last_mut() else { bail!("linear: x has no dimensions") };
        let (n, k) = self.weight.dims2()?;
        *last = n;
        let rows = x.elem_count() / k;
        let x = x.reshape((rows, k))?.contiguous()?;
        let y = x.apply_op2_no_bwd(&self.weight, &MatmulNt)?;
        let y = match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        y.reshape(shape)
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
#[derive(Clone, Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor, // (dim), f32
    eps: f32,
}

impl RmsNorm {
    /// weight: (dim).
    pub(crate) fn new(weight: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self { weight: weight.to_dtype(DType::F32)?, eps: eps as f32 })
    }

    /// x: (..., dim) f32 -> the same shape.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

/// `silu(gate) * up` of a row that holds gate, then up.
struct SwiGlu;

impl CustomOp1 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, both) = layout.shape().dims2()?;
        let mut out = vec![0.0; rows * both / 2];
        activation::swiglu(Isa::detect(), floats(x, layout, "swiglu: x")?, both / 2, &mut out);
        Ok((CpuStorage::F32(out), (rows, both / 2).into()))
    }
}

/// The feed-forward part: `down(silu(gate(x)) * up(x))`.
#[derive(Clone, Debug)]
pub(crate) struct Mlp {
    gate_up: Linear, // (2 intermediate, hidden)
    down: Linear,    // (hidden, intermediate)
}

impl Mlp {
    /// gate, up: (intermediate, hidden); down: (hidden, intermediate).
    pub(crate) fn new(gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Self> {
        Ok(Self { gate_up: Linear::stack(&[gate, up])?, down: Linear::new(down, None)? })
    }

    /// x: (rows, hidden) f32 -> (rows, hidden).
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.gate_up.forward(x)?.apply_op1_no_bwd(&SwiGlu)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_linear_layer_agrees_with_candle() -> Result<()> {
        let device = Device::Cpu;
        let x = Tensor::randn(0f32, 1.0, (2, 3, 40), &device)?;
        let w = Tensor::randn(0f32, 1.0, (50, 40), &device)?;
        let b = Tensor::randn(0f32, 1.0, 50, &device)?;
        let want = x.reshape((6, 40))?.matmul(&w.t()?)?.broadcast_add(&b)?.reshape((2, 3, 50))?;
        let got = Linear::new(&w, Some(&b))?.forward(&x)?;
        let error = (got - want)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error < 1e-4, "{error}");
        Ok(())
    }

    #[test]
    fn swiglu_agrees_with_candle() -> Result<()> {
        let x = Tensor::randn(0f32, 3.0, (4, 34), &Device::Cpu)?;
        let halves = x.chunk(2, 1)?;
        let want = (halves[0].silu()? * &halves[1])?;
        let error = (x.apply_op1_no_bwd(&SwiGlu)? - want)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(error < 1e-5, "{error}");
        Ok(())
    }
}
