//! Stateless layers: linear, norms, SwiGLU. Weights keep their stored type; sums are f32.

use std::borrow::Cow;

use crate::compute::{Compute, sized};
use crate::kernels::products::{Product, Weight};
use crate::kernels::{activation, float, norm, quantized, threads::Threads};
use crate::weights::{LoadError, Mapped, Matrix, TensorList, WeightType, Weights};

/// `y = x W^T + b`, for weights of any type.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Weight,         // (out, in)
    bias: Option<Vec<f32>>, // (out)
}

impl Linear {
    /// weight: (out, in); bias: (out).
    pub(crate) fn new(weight: &Matrix<'_>, bias: Option<Vec<f32>>) -> Result<Self, LoadError> {
        Ok(Self { bias, ..Self::stack(std::slice::from_ref(weight))? })
    }

    /// Stacks matrices (out, in) that share an input. Floats of different types become f32; quantized matrices must
    /// have the same type.
    pub(crate) fn stack(weights: &[Matrix<'_>]) -> Result<Self, LoadError> {
        if let Some(Matrix { kind, rows, columns, .. }) = weights.iter().find(|w| !w.is_whole()) {
            let (kind, reason) = (*kind, "its bytes are not those of its shape".into());
            return Err(LoadError::Matrix { kind, rows: *rows, columns: *columns, reason });
        }
        let float = |w: &Matrix<'_>| match w.kind {
            WeightType::F32 => Some(float::Type::F32),
            WeightType::Bf16 => Some(float::Type::Bf16),
            WeightType::F16 => Some(float::Type::F16),
            WeightType::Q8_0 | WeightType::Q4_0 | WeightType::Q4K => None,
        };
        let refused = || {
            let shapes = weights.iter().map(|w| format!("{} {} x {}", w.kind, w.rows, w.columns));
            LoadError::Stack(shapes.collect::<Vec<_>>().join(", "))
        };
        let Some(&Matrix { kind, columns, .. }) = weights.first() else { return Err(refused()) };
        if weights.iter().any(|w| w.columns != columns || (kind.is_quantised() && w.kind != kind)) {
            return Err(refused());
        }
        let weight = match kind {
            WeightType::Q8_0 => Self::quantised(quantized::Kind::Q8_0, weights)?,
            WeightType::Q4_0 => Self::quantised(quantized::Kind::Q4_0, weights)?,
            WeightType::Q4K => Self::quantised(quantized::Kind::Q4K, weights)?,
            WeightType::F32 | WeightType::Bf16 | WeightType::F16 => {
                let parts = weights.iter().map(|w| Some(float::Rows { kind: float(w)?, bytes: &w.bytes }));
                Weight::Float(float::Packed::pack(&parts.collect::<Option<Vec<_>>>().ok_or_else(refused)?, columns))
            }
        };
        Ok(Self { weight, bias: None })
    }

    fn quantised(kind: quantized::Kind, weights: &[Matrix<'_>]) -> Result<Weight, LoadError> {
        let (rows, columns) = (weights.iter().map(|w| w.rows).sum(), weights[0].columns);
        let bytes = match weights {
            [one] => Cow::Borrowed(&*one.bytes),
            all => Cow::Owned(all.iter().map(|w| &*w.bytes).collect::<Vec<_>>().concat()),
        };
        let refused = |reason| LoadError::Matrix { kind: weights[0].kind, rows, columns, reason };
        quantized::Packed::pack(kind, &bytes, rows, columns, Threads::global()).map(Weight::Quantised).map_err(refused)
    }

    /// Outputs per row.
    pub(crate) fn width(&self) -> usize {
        self.weight.rows()
    }

    /// Bytes of the weights.
    pub(crate) fn bytes(&self) -> usize {
        self.weight.bytes() + self.bias.as_ref().map_or(0, |bias| bias.len() * size_of::<f32>())
    }

    /// One row of the weights in f32. out: (in)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        self.weight.row(row, out);
    }

    /// x: (rows, in) -> out: (rows, out)
    pub(crate) fn forward(&self, cx: &mut Compute, x: &[f32], out: &mut [f32]) {
        cx.products(&[self.product(x, out)]);
    }

    /// The product that [`Self::forward`] computes, to run in one job with others.
    pub(crate) fn product<'a>(&'a self, x: &'a [f32], out: &'a mut [f32]) -> Product<'a> {
        Product::new(&self.weight, self.bias.as_deref(), x, out)
    }
}

/// A matrix that is read row by row: an embedding that is separate from the output head.
#[derive(Debug)]
pub(crate) enum Table {
    /// In the checkpoint file.
    Mapped(Mapped),
    /// In memory.
    Packed(Linear),
}

impl Table {
    /// Loads a matrix (rows, columns) from the checkpoint.
    pub(crate) fn new(weights: &Weights<'_>, name: &str, rows: usize, columns: usize) -> Result<Self, LoadError> {
        Ok(match weights.mapped(name, rows, columns)? {
            Some(mapped) => Self::Mapped(mapped),
            None => Self::Packed(Linear::new(&weights.matrix(name, rows, columns)?, None)?),
        })
    }

    /// One row in f32. out: (columns)
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Mapped(mapped) => mapped.row(row, out),
            Self::Packed(linear) => linear.row(row, out),
        }
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
#[derive(Clone, Debug)]
pub(crate) struct RmsNorm {
    weight: Vec<f32>, // (dim)
    eps: f32,
}

impl RmsNorm {
    /// weight: (dim).
    pub(crate) fn new(weight: Vec<f32>, eps: f64) -> Self {
        Self { weight, eps: eps as f32 }
    }

    /// Loads `name.weight` (dim).
    pub(crate) fn load(weights: &Weights<'_>, name: &str, dim: usize, eps: f64) -> Result<Self, LoadError> {
        Ok(Self::new(weights.numbers(&format!("{name}.weight"), &[dim])?, eps))
    }

    /// x: (rows, dim) -> out: the same shape.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &[f32], out: &mut [f32]) {
        let (isa, dim) = (cx.isa, self.weight.len());
        cx.each(out, dim, &|row, out| norm::rms(isa, &x[row * dim..][..out.len()], &self.weight, self.eps, out));
    }
}

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over groups of `width` elements: a whole row, or each of its
/// heads.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm {
    weight: Vec<f32>, // (dim)
    bias: Vec<f32>,   // (dim)
    width: usize,
    eps: f32,
}

impl LayerNorm {
    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(list: &mut TensorList, name: &str, dim: usize) {
        list.floats(&format!("{name}.weight"), &[dim]);
        list.floats(&format!("{name}.bias"), &[dim]);
    }

    /// Loads `name.weight` and `name.bias` (dim).
    pub(crate) fn load(weights: &Weights<'_>, name: &str, dim: usize, eps: f64) -> Result<Self, LoadError> {
        let read = |part: &str| weights.numbers(&format!("{name}.{part}"), &[dim]);
        Ok(Self { weight: read("weight")?, bias: read("bias")?, width: dim, eps: eps as f32 })
    }

    /// Makes it a group norm over groups of `width` elements; `width` divides `dim`.
    pub(crate) fn of_groups(self, width: usize) -> Self {
        Self { width, ..self }
    }

    /// x: (rows, dim) -> out: the same shape.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &[f32], out: &mut [f32]) {
        let (isa, dim) = (cx.isa, self.weight.len());
        cx.each(out, dim, &|row, out| {
            let x = &x[row * dim..][..out.len()];
            norm::groups(isa, x, self.width, &self.weight, &self.bias, self.eps, out);
        });
    }
}

/// The kind of norm that a family uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormKind {
    /// [`RmsNorm`].
    Rms,
    /// [`LayerNorm`].
    Layer,
}

/// A norm of either kind.
#[derive(Clone, Debug)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Norm {
    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(kind: NormKind, list: &mut TensorList, name: &str, dim: usize) {
        match kind {
            NormKind::Rms => list.floats(&format!("{name}.weight"), &[dim]),
            NormKind::Layer => LayerNorm::tensors(list, name, dim),
        }
    }

    /// Loads the tensors of `name`.
    pub(crate) fn load(
        kind: NormKind,
        weights: &Weights<'_>,
        name: &str,
        dim: usize,
        eps: f64,
    ) -> Result<Self, LoadError> {
        Ok(match kind {
            NormKind::Rms => Self::Rms(RmsNorm::load(weights, name, dim, eps)?),
            NormKind::Layer => Self::Layer(LayerNorm::load(weights, name, dim, eps)?),
        })
    }

    /// x: (rows, dim) -> out: the same shape.
    pub(crate) fn forward(&self, cx: &mut Compute, x: &[f32], out: &mut [f32]) {
        match self {
            Self::Rms(norm) => norm.forward(cx, x, out),
            Self::Layer(norm) => norm.forward(cx, x, out),
        }
    }
}

/// The feed-forward part: `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub(crate) struct Mlp {
    gate_up: Linear, // (2 intermediate, hidden)
    down: Linear,    // (hidden, intermediate)
}

/// Intermediate results of an [`Mlp`], reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct MlpBuffers {
    gate_up: Vec<f32>, // (rows, 2 intermediate)
    inner: Vec<f32>,   // (rows, intermediate)
}

impl Mlp {
    /// gate, up: (intermediate, hidden); down: (hidden, intermediate).
    pub(crate) fn new(gate: Matrix<'_>, up: Matrix<'_>, down: &Matrix<'_>) -> Result<Self, LoadError> {
        Ok(Self { gate_up: Linear::stack(&[gate, up])?, down: Linear::new(down, None)? })
    }

    /// The tensors that [`Self::load`] reads.
    pub(crate) fn tensors(list: &mut TensorList, hidden: usize, inner: usize) {
        list.stack(&["gate_proj.weight", "up_proj.weight"], inner, hidden);
        list.matrix("down_proj.weight", hidden, inner);
    }

    /// Loads `{gate,up,down}_proj.weight`.
    pub(crate) fn load(weights: &Weights<'_>, hidden: usize, inner: usize) -> Result<Self, LoadError> {
        Self::new(
            weights.matrix("gate_proj.weight", inner, hidden)?,
            weights.matrix("up_proj.weight", inner, hidden)?,
            &weights.matrix("down_proj.weight", hidden, inner)?,
        )
    }

    /// Bytes of the weights.
    pub(crate) fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// x: (rows, hidden) -> out: (rows, hidden)
    pub(crate) fn forward(&self, cx: &mut Compute, x: &[f32], buffers: &mut MlpBuffers, out: &mut [f32]) {
        let (isa, width) = (cx.isa, self.gate_up.width() / 2);
        let rows = out.len() / self.down.width();
        let gate_up = sized(&mut buffers.gate_up, rows * 2 * width);
        self.gate_up.forward(cx, x, gate_up);
        let inner = sized(&mut buffers.inner, rows * width);
        let both = &*gate_up;
        cx.each(inner, width, &|row, out| {
            activation::swiglu(isa, &both[row * 2 * width..][..2 * out.len()], width, out);
        });
        self.down.forward(cx, inner, out);
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use candle_core::{Device, Result, Tensor};

    use super::*;

    fn error(got: &[f32], want: &Tensor) -> Result<f32> {
        let got = Tensor::from_slice(got, want.shape(), want.device())?;
        (got - want)?.abs()?.max_all()?.to_scalar()
    }

    fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
        tensor.flatten_all()?.to_vec1()
    }

    fn matrix(tensor: &Tensor) -> Result<Matrix<'static>> {
        let (rows, columns) = tensor.dims2()?;
        let bytes: Vec<u8> = numbers(tensor)?.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(Matrix { kind: WeightType::F32, bytes: bytes.into(), rows, columns })
    }

    #[test]
    fn a_linear_layer_agrees_with_candle() -> std::result::Result<(), Box<dyn Error>> {
        let device = Device::Cpu;
        let x = Tensor::randn(0f32, 1.0, (6, 40), &device)?;
        let w = Tensor::randn(0f32, 1.0, (50, 40), &device)?;
        let b = Tensor::randn(0f32, 1.0, 50, &device)?;
        let want = x.matmul(&w.t()?)?.broadcast_add(&b)?;
        let mut got = vec![f32::NAN; 6 * 50];
        let mut cx = Compute::new(Threads::new(2).into());
        Linear::new(&matrix(&w)?, Some(numbers(&b)?))?.forward(&mut cx, &numbers(&x)?, &mut got);
        assert!(error(&got, &want)? < 1e-4);
        Ok(())
    }

    #[test]
    fn the_feed_forward_part_and_the_norm_agree_with_candle() -> std::result::Result<(), Box<dyn Error>> {
        let random = |shape: (usize, usize)| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
        let (x, gate, up, down) = (random((700, 24))?, random((34, 24))?, random((34, 24))?, random((24, 34))?);
        let mut cx = Compute::new(Threads::new(3).into());
        let mut got = vec![f32::NAN; 700 * 24];
        let mlp = Mlp::new(matrix(&gate)?, matrix(&up)?, &matrix(&down)?)?;
        mlp.forward(&mut cx, &numbers(&x)?, &mut MlpBuffers::default(), &mut got);
        let inner = (x.matmul(&gate.t()?)?.silu()? * x.matmul(&up.t()?)?)?;
        assert!(error(&got, &inner.matmul(&down.t()?)?)? < 2e-3);

        let weight = Tensor::randn(1f32, 0.2, 24, &Device::Cpu)?;
        RmsNorm::new(numbers(&weight)?, 1e-5).forward(&mut cx, &numbers(&x)?, &mut got);
        assert!(error(&got, &candle_nn::ops::rms_norm(&x, &weight, 1e-5)?)? < 1e-5);
        Ok(())
    }
}
