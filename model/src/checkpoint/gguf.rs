//! The header of a GGUF file: the name, shape, type and offset of each tensor. Metadata is skipped and not kept, so that
//! a hostile header cannot take more memory than the names of its tensors. Every error about a tensor names it.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::weights::{Entry, WeightType};

/// The default of `general.alignment`.
const ALIGNMENT: usize = 32;
/// The maximum number of dimensions in ggml.
const DIMENSIONS: u32 = 4;
/// The maximum depth of nested arrays; real files have one level.
const DEPTH: u32 = 16;

/// The type of one of ggml's numbers; `None` for a type that no layer supports.
fn kind(number: u32) -> (Option<WeightType>, String) {
    let kind = match number {
        0 => WeightType::F32,
        1 => WeightType::F16,
        2 => WeightType::Q4_0,
        8 => WeightType::Q8_0,
        12 => WeightType::Q4K,
        30 => WeightType::Bf16,
        _ => return (None, format!("{number} of ggml's types")),
    };
    (Some(kind), kind.name().to_uppercase())
}

/// Reads the header of a whole file in memory.
pub(super) fn entries(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    let mut header = Header { bytes, at: 0, what: "the head" };
    if header.take(4)? != b"GGUF" {
        return Err("must begin with GGUF".into());
    }
    match header.u32()? {
        2 | 3 => {}
        version => return Err(format!("version must be 2 or 3, found {version}")),
    }
    let (tensors, pairs) = (header.u64()?, header.u64()?);
    let mut alignment = ALIGNMENT;
    header.what = "the metadata";
    for _ in 0..pairs {
        let key = header.string()?;
        let kind = header.u32()?;
        if key == b"general.alignment" {
            let found = if kind == 4 { header.u32()? as usize } else { 0 };
            alignment = Some(found)
                .filter(|&found| found > 0 && found.is_multiple_of(8))
                .ok_or("general.alignment must be a u32 and a multiple of 8")?;
        } else {
            header.skip(kind, DEPTH)?;
        }
    }
    header.what = "the tensors' descriptions";
    let mut described = Vec::new();
    for _ in 0..tensors {
        described.push(header.tensor()?);
    }
    let data = header.at.checked_next_multiple_of(alignment).ok_or("general.alignment is past all bounds")?;
    let mut entries = BTreeMap::new();
    for tensor in described {
        let (name, entry) = locate(tensor, data, alignment, bytes.len())?;
        if entries.contains_key(&name) {
            return Err(format!("{name} is described twice"));
        }
        entries.insert(name, entry);
    }
    apart(&entries)?;
    Ok(entries)
}

/// The description of a tensor in the header.
struct Described {
    name: String,
    shape: Vec<u64>,
    number: u32,
    offset: u64,
}

/// Finds the bytes of a tensor in the file.
fn locate(tensor: Described, data: usize, alignment: usize, length: usize) -> Result<(String, Entry), String> {
    let Described { name, shape, number, offset } = tensor;
    let (kind, stored) = kind(number);
    let outside = || format!("{name} lies outside of the file, which has {length} bytes");
    let start = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(data));
    let start = start.filter(|&start| start <= length).ok_or_else(outside)?;
    if !(start - data).is_multiple_of(alignment) {
        return Err(format!("{name} must lie at a multiple of {alignment} bytes, found {offset}"));
    }
    let shape: Option<Vec<usize>> = shape.into_iter().map(|side| usize::try_from(side).ok()).collect();
    let numbers = shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, &side| n.checked_mul(side)));
    let (shape, numbers) = shape.zip(numbers).ok_or_else(outside)?;
    let mut size = 0;
    if let Some(kind) = kind {
        let (block, block_bytes) = kind.block();
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(format!("{name} has rows of {row} numbers, which are no whole blocks of {stored}"));
        }
        size = (numbers / block).checked_mul(block_bytes).ok_or_else(outside)?;
    }
    let end = start.checked_add(size).filter(|&end| end <= length).ok_or_else(outside)?;
    Ok((name, Entry { kind, stored, shape, range: start..end }))
}

/// Refuses tensors that overlap: a wrong offset inside the file points into another tensor.
fn apart(entries: &BTreeMap<String, Entry>) -> Result<(), String> {
    let mut ranges: Vec<(&Range<usize>, &String)> = entries.iter().map(|(name, entry)| (&entry.range, name)).collect();
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(format!("{} and {} lie in the same bytes", pair[0].1, pair[1].1)),
        None => Ok(()),
    }
}

/// A cursor over the header.
struct Header<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The section being read, for the error if the file ends in it.
    what: &'static str,
}

impl<'a> Header<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8], String> {
        let taken = usize::try_from(count).ok().and_then(|count| self.bytes.get(self.at..)?.get(..count));
        let taken = taken.ok_or_else(|| format!("ends at byte {}, within {}", self.bytes.len(), self.what))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.number().map(u64::from_le_bytes)
    }

    fn string(&mut self) -> Result<&'a [u8], String> {
        let length = self.u64()?;
        self.take(length)
    }

    /// Skips a value of the metadata.
    fn skip(&mut self, kind: u32, depth: u32) -> Result<(), String> {
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => self.u64()?,
            9 if depth == 0 => return Err("has arrays in arrays past all bounds".into()),
            9 => return self.skip_array(depth - 1),
            other => return Err(format!("has a value of the unknown type {other} in its metadata")),
        };
        self.take(size).map(drop)
    }

    fn skip_array(&mut self, depth: u32) -> Result<(), String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        // Every value has at least one byte, so that a count past the end of the file fails early.
        for _ in 0..count {
            self.skip(kind, depth)?;
        }
        Ok(())
    }

    fn tensor(&mut self) -> Result<Described, String> {
        let name = std::str::from_utf8(self.string()?).map_err(|_| "has a tensor whose name is no UTF-8")?.to_owned();
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS {
            return Err(format!("{name} must have at most {DIMENSIONS} dimensions, found {dimensions}"));
        }
        // ggml's first dimension is the innermost.
        let mut shape = (0..dimensions).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        Ok(Described { name, shape, number: self.u32()?, offset: self.u64()? })
    }
}
