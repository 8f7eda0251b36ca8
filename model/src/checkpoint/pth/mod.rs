//! A `.pth` file as `torch.save` writes it: an uncompressed zip archive with a pickle that describes the tensors, and
//! one file with the values of each storage. The pickle is parsed, never run, and the values stay in the mapped file.

mod archive;
mod pickle;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::weights::{Entry, Reading, WeightType};
use pickle::{Tensor, shown};

use super::gguf::apart;

/// The first bytes of a zip archive.
pub(super) const MAGIC: &[u8] = b"PK\x03\x04";
/// The first bytes of files written before PyTorch 1.6, which are bare pickles instead of archives.
pub(super) const OLD_MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";

/// The maximum length of the pickle; a tensor takes about 200 bytes.
const PICKLE: usize = 1 << 22;

/// Returns the tensors of a file, by name.
pub(super) fn entries(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    let files = archive::files(bytes)?;
    let mut pickles = files.keys().filter_map(|name| name.strip_suffix("data.pkl"));
    let (Some(root), None) = (pickles.next(), pickles.next()) else {
        return Err("must have one data.pkl, as torch.save writes it".into());
    };
    let pickle = &bytes[files[&format!("{root}data.pkl")].clone()];
    if pickle.len() > PICKLE {
        return Err(format!("data.pkl has {} bytes, the maximum is {PICKLE}", pickle.len()));
    }
    if let Some(order) = files.get(&format!("{root}byteorder")).map(|range| &bytes[range.clone()])
        && order != b"little"
    {
        return Err("must be little-endian".into());
    }
    let mut entries = BTreeMap::new();
    for (name, tensor) in pickle::tensors(pickle)? {
        let storage = files.get(&format!("{root}data/{}", tensor.storage));
        let storage = storage
            .ok_or_else(|| format!("{}: the archive has no file data/{}", shown(name), shown(tensor.storage)))?;
        let entry = entry(&tensor, storage).map_err(|reason| format!("{} {reason}", shown(name)))?;
        if entries.insert(name.to_owned(), entry).is_some() {
            return Err(format!("{} appears twice", shown(name)));
        }
    }
    apart(&entries)?;
    Ok(entries)
}

/// Makes the entry of a tensor whose values are in `storage`.
fn entry(tensor: &Tensor<'_>, storage: &Range<usize>) -> Result<Entry, String> {
    let Tensor { class, numbers: all, offset, shape, strides, .. } = tensor;
    let kind = match *class {
        "FloatStorage" => Some(WeightType::F32),
        "HalfStorage" => Some(WeightType::F16),
        "BFloat16Storage" => Some(WeightType::Bf16),
        _ => None,
    };
    let stored = class.strip_suffix("Storage").unwrap_or(class).to_uppercase();
    let outside = || "lies outside its storage".to_owned();
    let numbers = shape.iter().try_fold(1usize, |numbers, &side| numbers.checked_mul(side)).ok_or_else(outside)?;
    if !is_contiguous(shape, strides) {
        return Err("must lie in one piece, row by row: save it after .contiguous()".into());
    }
    let last = offset.checked_add(numbers).filter(|last| last <= all).ok_or_else(outside)?;
    let width = kind.map_or(0, |kind| kind.block().1);
    let end = last.checked_mul(width).filter(|&end| end <= storage.len()).ok_or_else(outside)?;
    let range = storage.start + offset * width..storage.start + end;
    Ok(Entry { kind, repacked: None, stored, shape: shape.clone(), range, reading: Reading::Plain })
}

/// Returns whether the elements of a tensor are contiguous. The stride of a dimension of size 1 does not matter.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = 1usize;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&side, &stride)| {
            let fits = side == 1 || stride == step;
            step = step.saturating_mul(side);
            fits
        })
}
