//! Stateless layers on the device: products, norms, the embedding.

use super::device::{Buffer, CudaDevice};
use super::gpu::{Arg, Fields, Launch, Result};
use super::weights::{Kind, Packed, Stack, TILE_COLUMNS, pack};
use crate::weights::{LoadError, Matrix};

/// How the result of a product is stored; as `Mode` in model/cuda/linear.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Stored, as f32.
    Store = 0,
    /// Added to the f32 numbers already in the output.
    Add = 1,
    /// Half of the outputs are SwiGLU's gates, half its values; the result is stored in the weights' type.
    Swiglu = 2,
}

/// How a product is divided into thread blocks: see model/cuda/linear.cuh.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// Blocks of 8 rows and 16 outputs: bound by the bytes of the weights.
    Eight,
    Sixteen,
    ThirtyTwo,
    /// Blocks of 64 rows and 64 outputs.
    Some,
    /// Blocks of 64 rows and 128 outputs: bound by arithmetic.
    Many,
}

impl Form {
    /// Returns the form for `rows` rows and `outs` outputs (gates and ups both count), as measured on an H100. Larger
    /// blocks read less, and pay off once there are three for every two multiprocessors. For 33 to 64 rows, blocks of
    /// 32 rows pay off, although they read the weights twice, if blocks of 64 would occupy less than half of the
    /// multiprocessors.
    fn of(rows: usize, outs: usize, processors: usize) -> Self {
        let blocks = |of_outs: usize| outs.div_ceil(of_outs) * rows.div_ceil(64);
        match rows {
            ..=8 => Self::Eight,
            9..=16 => Self::Sixteen,
            17..=32 => Self::ThirtyTwo,
            33..=64 if 2 * blocks(64) < processors => Self::ThirtyTwo,
            _ if 2 * blocks(128) >= 3 * processors => Self::Many,
            _ => Self::Some,
        }
    }
}

/// Rows of numbers on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) at: u64,
    /// The distance between rows, in numbers.
    pub(super) stride: usize,
}

/// Inputs of products, as f32 and as 16-bit floats in separate areas. The padding of a row stays 0.
#[derive(Debug)]
pub(super) struct Inputs {
    buffer: Buffer,
    pub(super) stride: usize,
    rows: usize,
}

impl Inputs {
    pub(super) fn new(device: &CudaDevice, rows: usize, columns: usize) -> Result<Self> {
        let stride = columns.next_multiple_of(TILE_COLUMNS);
        Ok(Self { buffer: device.buffer("a step", Self::bytes(rows, columns))?, stride, rows })
    }

    pub(super) fn bytes(rows: usize, columns: usize) -> usize {
        rows * columns.next_multiple_of(TILE_COLUMNS) * (size_of::<f32>() + size_of::<u16>())
    }

    pub(super) fn rows(&self, kind: Kind) -> Rows {
        let after = if kind == Kind::F32 { 0 } else { self.rows * self.stride * size_of::<f32>() };
        Rows { at: self.buffer.at + after as u64, stride: self.stride }
    }
}

/// `y = x W^T + b` on the device; x has the weights' type.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Buffer,
    bias: Option<Buffer>, // (outs), for f32 weights
    pub(super) kind: Kind,
    ins: usize,
    outs: usize,
    mode: Mode,
}

impl Linear {
    /// Stacks matrices that share one input, in the type that [`Kind::of`] gives.
    pub(super) fn new(
        device: &CudaDevice,
        matrices: &[&Matrix<'_>],
        mode: Mode,
    ) -> std::result::Result<Self, LoadError> {
        Self::of_kind(device, matrices, mode, Kind::of(matrices))
    }

    pub(super) fn of_kind(
        device: &CudaDevice,
        matrices: &[&Matrix<'_>],
        mode: Mode,
        kind: Kind,
    ) -> std::result::Result<Self, LoadError> {
        let stack = if mode == Mode::Swiglu { Stack::Paired } else { Stack::Under };
        let Packed { kind, bytes, rows, columns } = pack(matrices, stack, kind)?;
        let weight = device.with("a matrix", &bytes)?;
        Ok(Self { weight, bias: None, kind, ins: columns, outs: rows, mode })
    }

    /// Creates an f32 layer. weight: (outs, ins), bias: (outs)
    pub(super) fn plain(device: &CudaDevice, weight: &[f32], bias: &[f32]) -> Result<Self> {
        let outs = bias.len();
        Ok(Self {
            weight: device.floats("a gate", weight)?,
            bias: Some(device.floats("a gate", bias)?),
            kind: Kind::F32,
            ins: weight.len() / outs,
            outs,
            mode: Mode::Store,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        self.weight.bytes + self.bias.as_ref().map_or(0, |bias| bias.bytes)
    }

    /// Computes the product. x: (rows, x.stride) in the weights' type, zeros after `ins` -> y: (rows, y.stride)
    pub(super) fn forward(&self, device: &CudaDevice, rows: usize, x: Rows, y: Rows) -> Result<()> {
        self.forward_by(device, Form::of(rows, self.outs, device.0.processors()), rows, (x, y))
    }

    /// Does [`Self::forward`] with a chosen kernel; all give the same bits. For f32 weights, the sizes choose between
    /// two kernels, which do too.
    pub(super) fn forward_by(&self, device: &CudaDevice, form: Form, rows: usize, (x, y): (Rows, Rows)) -> Result<()> {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.at);
        let of = Fields::default().pointers(&[self.weight.at, bias, x.at, y.at]).numbers(&[
            rows,
            self.ins,
            self.outs,
            x.stride,
            y.stride,
            self.mode as usize,
        ]);
        let [eight, sixteen, thirty_two, some, many] = match self.kind {
            Kind::Bf16 => ["linear_bf16_8", "linear_bf16_16", "linear_bf16_32", "linear_bf16_some", "linear_bf16_many"],
            Kind::F16 => ["linear_f16_8", "linear_f16_16", "linear_f16_32", "linear_f16_some", "linear_f16_many"],
            Kind::F32 => {
                let outs = if self.mode == Mode::Swiglu { self.outs / 2 } else { self.outs };
                let blocks = |of_outs: usize| outs.div_ceil(of_outs) * rows.div_ceil(8);
                let full = blocks(4) >= device.0.processors();
                let (kernel, of_outs) = if full { ("linear_f32_4", 4) } else { ("linear_f32_1", 1) };
                let grid = [outs.div_ceil(of_outs), rows.div_ceil(8), 1];
                return launch(device, kernel, grid, 256, 0, &[Arg::Struct(&of)]);
            }
        };
        let (kernel, outs, of_rows, threads, shared) = match form {
            Form::Eight => (eight, 16, 8, 256, 0),
            Form::Sixteen => (sixteen, 16, 16, 256, 0),
            Form::ThirtyTwo => (thirty_two, 16, 32, 256, 0),
            Form::Some => (some, 64, 64, 128, stages(64 + 64)),
            Form::Many => (many, 128, 64, 128, stages(128 + 64)),
        };
        let grid = [self.outs.div_ceil(outs), rows.div_ceil(of_rows), 1];
        launch(device, kernel, grid, threads, shared, &[Arg::Struct(&of)])
    }

    /// Copies the weights' rows for tokens. ids: (tokens) -> x: (tokens, hidden)
    pub(super) fn embed(&self, device: &CudaDevice, tokens: usize, ids: u64, x: u64) -> Result<()> {
        let args = [
            Arg::Pointer(self.weight.at),
            Arg::Pointer(ids),
            Arg::Pointer(x),
            Arg::Number(self.ins as u32),
            Arg::Number(self.kind as u32),
        ];
        launch(device, "embed", [tokens, 1, 1], 256, 0, &args)
    }
}

/// Returns the bytes of shared memory of a block with that many outputs and rows: see model/cuda/linear.cuh.
fn stages(outs_and_rows: usize) -> usize {
    const STAGES: usize = 3;
    const TILES: usize = 2;
    STAGES * TILES * outs_and_rows * TILE_COLUMNS * size_of::<u16>()
}

/// An RMS norm: `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug)]
pub(super) struct RmsNorm {
    weight: Buffer, // (dim)
    dim: usize,
    eps: f32,
}

impl RmsNorm {
    pub(super) fn new(device: &CudaDevice, weight: &[f32], eps: f64) -> Result<Self> {
        Ok(Self { weight: device.floats("a norm", weight)?, dim: weight.len(), eps: eps as f32 })
    }

    /// Normalizes rows. x: (rows, dim) f32 -> y: (rows, y.stride) as `kind`, and if `plain` as f32 too
    pub(super) fn forward(
        &self,
        device: &CudaDevice,
        rows: usize,
        x: u64,
        y: &Inputs,
        (kind, plain): (Kind, bool),
    ) -> Result<()> {
        let beside = if plain && kind != Kind::F32 { y.rows(Kind::F32).at } else { 0 };
        let args = [
            Arg::Pointer(x),
            Arg::Pointer(self.weight.at),
            Arg::Pointer(y.rows(kind).at),
            Arg::Pointer(beside),
            Arg::Number(self.dim as u32),
            Arg::Number(y.stride as u32),
            Arg::Real(self.eps),
            Arg::Number(kind as u32),
        ];
        launch(device, "rms_norm", [rows, 1, 1], 256, 0, &args)
    }

    /// Normalizes each head. x: (rows, heads dim) f32 -> y: (rows, y.stride) as `kind`
    pub(super) fn heads(
        &self,
        device: &CudaDevice,
        rows: usize,
        heads: usize,
        x: u64,
        y: Rows,
        kind: Kind,
    ) -> Result<()> {
        let args = [
            Arg::Pointer(x),
            Arg::Pointer(self.weight.at),
            Arg::Pointer(y.at),
            Arg::Number(self.dim as u32),
            Arg::Number(y.stride as u32),
            Arg::Real(self.eps),
            Arg::Number(kind as u32),
        ];
        launch(device, "head_norm", [heads, rows, 1], 32, 0, &args)
    }
}

/// Launches a kernel.
pub(super) fn launch(
    device: &CudaDevice,
    kernel: &str,
    grid: [usize; 3],
    threads: usize,
    shared: usize,
    args: &[Arg<'_>],
) -> Result<()> {
    device.0.launch(Launch { kernel, grid, threads, shared, args })
}
