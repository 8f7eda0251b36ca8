//! Matrices in the layout that the kernels read: 16-bit floats in tiles of the tensor cores, or f32 row by row.

use candle_core::Device;
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use half::f16;
use rayon::prelude::*;

use crate::kernels;
use crate::weights::{LoadError, Matrix, WeightType, widen};

/// The type of a matrix on the device; as `Kind` in model/cuda/maths.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32 = 0,
    Bf16 = 1,
    F16 = 2,
}

/// Columns of a tile; the rows of an input are padded to a multiple of it.
pub(super) const TILE_COLUMNS: usize = 32;
const TILE_ROWS: usize = 16;
const TILE: usize = TILE_ROWS * TILE_COLUMNS;

/// How matrices that share an input are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stack {
    /// One below the other.
    Under,
    /// Two matrices in alternation, eight rows of each, as SwiGLU needs them.
    Paired,
}

/// Matrices that share an input, packed for the device.
#[derive(Debug)]
pub(super) struct Packed {
    pub(super) kind: Kind,
    pub(super) bytes: Vec<u8>,
    /// The rows of all matrices.
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Kind {
    /// Returns the device type of matrices that share an input or follow one another: bf16 if all are bf16; f16 if all
    /// are f16 or quantized; else f32.
    pub(super) fn of(matrices: &[&Matrix<'_>]) -> Self {
        if matrices.iter().all(|m| m.kind == WeightType::Bf16) {
            Self::Bf16
        } else if matrices.iter().all(|m| m.kind == WeightType::F16 || m.kind.is_quantised()) {
            Self::F16
        } else {
            Self::F32
        }
    }
}

/// Returns a matrix's numbers as 16-bit floats of this kind, unchanged if they already have it. Finite numbers stay
/// finite.
fn halves(matrix: &Matrix<'_>, kind: Kind) -> Result<Vec<u16>, LoadError> {
    if matches!((matrix.kind, kind), (WeightType::Bf16, Kind::Bf16) | (WeightType::F16, Kind::F16)) {
        return Ok(matrix.bytes.as_chunks::<2>().0.iter().map(|&b| u16::from_le_bytes(b)).collect());
    }
    let round = |v: f32| if kind == Kind::Bf16 { kernels::nearest(v).to_bits() } else { nearest_f16(v).to_bits() };
    Ok(singles(matrix)?.into_iter().map(round).collect())
}

/// Returns a matrix's numbers as f32.
fn singles(matrix: &Matrix<'_>) -> Result<Vec<f32>, LoadError> {
    widen(matrix.kind, &matrix.bytes).map_or_else(|| dequantised(matrix), Ok)
}

/// Returns a quantized matrix as f32, dequantized by candle.
fn dequantised(matrix: &Matrix<'_>) -> Result<Vec<f32>, LoadError> {
    let kind = match matrix.kind {
        WeightType::Q8_0 => GgmlDType::Q8_0,
        WeightType::Q4_0 => GgmlDType::Q4_0,
        WeightType::Q4K => GgmlDType::Q4K,
        WeightType::F32 => GgmlDType::F32,
        WeightType::F16 => GgmlDType::F16,
        WeightType::Bf16 => GgmlDType::BF16,
    };
    let tensor = qtensor_from_ggml(kind, &matrix.bytes, vec![matrix.rows, matrix.columns], &Device::Cpu)?;
    Ok(tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?)
}

/// Packs matrices that share an input (each (rows, columns)) for the device.
pub(super) fn pack(matrices: &[&Matrix<'_>], stack: Stack, kind: Kind) -> Result<Packed, LoadError> {
    let rows = matrices.iter().map(|m| m.rows).sum();
    let columns = matrices.first().map_or(0, |m| m.columns);
    let bytes = if kind == Kind::F32 {
        let numbers = matrices.iter().map(|m| singles(m)).collect::<Result<Vec<_>, _>>()?;
        super::device::bytes_of(&numbers.concat())
    } else {
        let numbers = matrices.iter().map(|m| halves(m, kind)).collect::<Result<Vec<_>, _>>()?;
        tiles(&numbers.concat(), rows, columns, stack)
    };
    Ok(Packed { kind, bytes, rows, columns })
}

/// Lays out the numbers (rows, columns) in tiles, in the order of the fragments' registers: see model/cuda/linear.cuh.
fn tiles(numbers: &[u16], rows: usize, columns: usize, stack: Stack) -> Vec<u8> {
    let across = columns.div_ceil(TILE_COLUMNS);
    let down = match stack {
        Stack::Under => rows.div_ceil(TILE_ROWS),
        Stack::Paired => (rows / 2).div_ceil(TILE_ROWS / 2),
    };
    // The matrix row for a row of a tile; none after the last.
    let source = |tile: usize, row: usize| match stack {
        Stack::Under => Some(tile * TILE_ROWS + row).filter(|&row| row < rows),
        Stack::Paired => {
            let of_half = tile * TILE_ROWS / 2 + row % (TILE_ROWS / 2);
            (of_half < rows / 2).then_some(of_half + if row < TILE_ROWS / 2 { 0 } else { rows / 2 })
        }
    };
    let mut out = vec![0u8; down * across * TILE * 2];
    out.par_chunks_mut(across * TILE * 2).enumerate().for_each(|(tile, out)| {
        for (i, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let (along, within) = (i / TILE, i % TILE);
            // (half, lane = 4 g + t, fragment, which of its two numbers)
            let (half, lane, register, which) = (within / 256, within / 8 % 32, within / 2 % 4, within % 2);
            let row = lane / 4 + register % 2 * 8;
            let column = along * TILE_COLUMNS + lane % 4 * 8 + half * 4 + register / 2 * 2 + which;
            if let Some(row) = source(tile, row).filter(|_| column < columns) {
                *out = numbers[row * columns + column].to_le_bytes();
            }
        }
    });
    out
}

/// Returns a number of S as bf16, rounded to nearest as on the CPU.
pub(super) fn nearest(v: f32) -> [u8; 2] {
    kernels::nearest(v).to_le_bytes()
}

/// Rounds to the nearest f16. A finite number that is too large becomes the largest finite f16, as in
/// model/cuda/maths.cuh: the CPU computes with these weights in f32, where they are finite.
fn nearest_f16(v: f32) -> f16 {
    let most = f16::MAX.to_f32();
    f16::from_f32(if v.is_finite() { v.clamp(-most, most) } else { v })
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn finite_numbers_stay_finite_in_16_bits() {
        // A block of q8_0: the scale, the largest f16, and 32 signed bytes, of which 129 is -127.
        let mut block = f16::MAX.to_le_bytes().to_vec();
        block.extend([127, 129, 0, 1]);
        block.resize(34, 0);
        let matrix = Matrix { kind: WeightType::Q8_0, bytes: block.into(), rows: 1, columns: 32 };
        let found = halves(&matrix, Kind::F16).unwrap();
        assert_eq!(found[..4], [f16::MAX, f16::MIN, f16::ZERO, f16::MAX].map(f16::to_bits));
        assert_eq!([f32::MAX, f32::MIN].map(nearest), [bf16::MAX, bf16::MIN].map(bf16::to_le_bytes));
    }
}
