//! Conversion between weight types. Candle does the quantization.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use half::{bf16, f16};
use rayon::prelude::*;

use super::error::LoadError;
use super::matrix::{Matrix, WeightType};

/// Converts floats to f32; `None` for quantized types.
pub(crate) fn widen(kind: WeightType, bytes: &[u8]) -> Option<Vec<f32>> {
    let mut out = vec![0.0; bytes.len() / kind.block().1];
    (!kind.is_quantised()).then(|| widen_into(kind, bytes, &mut out))?;
    Some(out)
}

/// Converts floats to f32; does nothing for quantized types.
pub(super) fn widen_into(kind: WeightType, bytes: &[u8], out: &mut [f32]) {
    match kind {
        WeightType::F32 => each(bytes, out, f32::from_le_bytes),
        WeightType::Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        WeightType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        WeightType::Q8_0 | WeightType::Q4_0 | WeightType::Q4K => {}
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], widen: impl Fn([u8; N]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(out, &bytes)| *out = widen(bytes));
}

/// Returns the logarithms of the negated numbers, or a number that has none. It goes through f64, so that -exp of the
/// results is as close to the numbers as f32 allows.
pub(super) fn logarithms(numbers: &[f32]) -> Result<Vec<f32>, f32> {
    let logarithm = |&number: &f32| match (-f64::from(number)).ln() {
        log if log.is_finite() => Ok(log as f32),
        _ => Err(number),
    };
    numbers.iter().map(logarithm).collect()
}

/// Transposes a matrix to one of `rows` rows; its elements have `width` bytes.
pub(super) fn transposed(bytes: &[u8], width: usize, rows: usize) -> Vec<u8> {
    let columns = bytes.len() / width / rows.max(1);
    let number = |row: usize, column: usize| &bytes[(column * rows + row) * width..][..width];
    (0..rows).flat_map(|row| (0..columns).flat_map(move |column| number(row, column))).copied().collect()
}

/// Makes a matrix of type `kind`, or of f16 if its rows are not whole blocks.
pub(super) fn matrix(
    numbers: &[f32],
    kind: WeightType,
    rows: usize,
    columns: usize,
) -> Result<Matrix<'static>, LoadError> {
    let kind = kind.for_rows_of(columns);
    let bytes = match kind {
        WeightType::F32 => numbers.iter().flat_map(|v| v.to_le_bytes()).collect(),
        WeightType::Bf16 => numbers.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        WeightType::F16 => numbers.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        WeightType::Q8_0 => quantised(numbers, columns, GgmlDType::Q8_0)?,
        WeightType::Q4_0 => quantised(numbers, columns, GgmlDType::Q4_0)?,
        WeightType::Q4K => quantised(numbers, columns, GgmlDType::Q4K)?,
    };
    Ok(Matrix { kind, bytes: bytes.into(), rows, columns })
}

fn quantised(numbers: &[f32], columns: usize, kind: GgmlDType) -> Result<Vec<u8>, LoadError> {
    let tensor = Tensor::from_slice(numbers, (numbers.len() / columns, columns), &Device::Cpu)?;
    Ok(QTensor::quantize(&tensor, kind)?.data()?.into_owned())
}

/// Number of elements that are repacked at a time.
const PIECE: usize = 1 << 18;

/// Repacks quantized rows of `columns` elements to another quantized type through f32 -> their bytes, and the relative
/// error. It handles a few rows at a time, because all of them in f32 would take several times the memory of the model.
pub(super) fn repacked(
    bytes: &[u8],
    from: GgmlDType,
    to: WeightType,
    columns: usize,
) -> Result<(Vec<u8>, f64), LoadError> {
    let row = columns / from.block_size() * from.type_size();
    let pieces = bytes.par_chunks(((PIECE / columns.max(1)).max(1) * row).max(1)).map(|piece| {
        let rows = piece.len() / row.max(1);
        let stored = QStorage::from_data(piece.into(), &Device::Cpu, from)?;
        let wide = QTensor::new(stored, (rows, columns))?.dequantize(&Device::Cpu)?;
        let wide = wide.flatten_all()?.to_vec1::<f32>()?;
        let packed = matrix(&wide, to, rows, columns)?.bytes.into_owned();
        let sums = squares(&wide, &packed, to, columns)?;
        Ok((packed, sums))
    });
    // Collected in the order of the pieces, so that the sums are always the same.
    let pieces = pieces.collect::<Result<Vec<_>, LoadError>>()?;
    let (error, all) = pieces.iter().fold((0.0, 0.0), |(error, all), (_, sums)| (error + sums.0, all + sums.1));
    let bytes: Vec<Vec<u8>> = pieces.into_iter().map(|(bytes, _)| bytes).collect();
    Ok((bytes.concat(), if all > 0.0 { (error / all).sqrt() } else { 0.0 }))
}

/// Returns the sum of squared differences between values and their packed form, and the sum of squared values.
fn squares(wide: &[f32], packed: &[u8], to: WeightType, columns: usize) -> Result<(f64, f64), LoadError> {
    let kind = match to {
        WeightType::Q8_0 => GgmlDType::Q8_0,
        WeightType::Q4_0 => GgmlDType::Q4_0,
        WeightType::Q4K => GgmlDType::Q4K,
        WeightType::F32 | WeightType::Bf16 | WeightType::F16 => return Ok((0.0, 0.0)),
    };
    let stored = QStorage::from_data(packed.into(), &Device::Cpu, kind)?;
    let again = QTensor::new(stored, (wide.len() / columns.max(1), columns))?.dequantize(&Device::Cpu)?;
    let again = again.flatten_all()?.to_vec1::<f32>()?;
    let difference = wide.iter().zip(&again).map(|(wide, again)| f64::from(wide - again).powi(2)).sum();
    Ok((difference, wide.iter().map(|&wide| f64::from(wide).powi(2)).sum()))
}
