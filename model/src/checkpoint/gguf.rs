//! The header of a GGUF file: its metadata, and the name, shape, type and offset of each tensor. Counts and lengths are
//! checked against the file size before anything is allocated, and values stay in the file, so a hostile header cannot
//! take more memory than its keys and names do. Every error about a tensor or a key names it.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::quantized::GgmlDType;

use crate::weights::{Entry, Reading, Value, WeightType};

/// The default of `general.alignment`.
const ALIGNMENT: u64 = 32;
/// The maximum number of dimensions of a tensor in ggml.
const DIMENSIONS: u32 = 4;
/// The maximum depth of nested arrays; real files have one level.
const DEPTH: u32 = 16;
/// The maximum number of tensors; the largest models have a few thousand.
const TENSORS: u64 = 1 << 16;
/// The maximum number of keys; real files have a few dozen.
const KEYS: u64 = 1 << 16;
/// The maximum length of a key or tensor name.
const NAME: usize = 1024;

/// The contents of a file before its tensor data.
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) entries: BTreeMap<String, Entry>,
}

/// Looks up a ggml data type. Returns the type in memory (`None` if no layer supports it), the type in the file if it
/// differs, and the name.
fn kind(number: u32) -> (Option<WeightType>, Option<GgmlDType>, String) {
    let kind = match number {
        0 => WeightType::F32,
        1 => WeightType::F16,
        2 => WeightType::Q4_0,
        8 => WeightType::Q8_0,
        12 => WeightType::Q4K,
        30 => WeightType::Bf16,
        _ => return without_kernel(number),
    };
    (Some(kind), None, kind.name().to_uppercase())
}

/// Looks up a type that has no kernel. Common ones are converted to q8_0.
fn without_kernel(number: u32) -> (Option<WeightType>, Option<GgmlDType>, String) {
    let (from, name) = match number {
        3 => (GgmlDType::Q4_1, "Q4_1"),
        6 => (GgmlDType::Q5_0, "Q5_0"),
        7 => (GgmlDType::Q5_1, "Q5_1"),
        10 => (GgmlDType::Q2K, "Q2_K"),
        11 => (GgmlDType::Q3K, "Q3_K"),
        13 => (GgmlDType::Q5K, "Q5_K"),
        14 => (GgmlDType::Q6K, "Q6_K"),
        _ => return (None, None, format!("{number} (ggml)")),
    };
    (Some(WeightType::Q8_0), Some(from), name.into())
}

/// Reads the header from the bytes of a whole file.
pub(super) fn header(bytes: &[u8]) -> Result<Header, String> {
    let mut cursor = Cursor { bytes, at: 0, what: "the head" };
    if cursor.take(4)? != b"GGUF" {
        return Err("must begin with GGUF".into());
    }
    match cursor.u32()? {
        2 | 3 => {}
        version if (1..=3).contains(&version.swap_bytes()) => {
            return Err("must be little-endian, found big-endian".into());
        }
        version => return Err(format!("version must be 2 or 3, found {version}")),
    }
    let (tensors, keys) = (cursor.u64()?, cursor.u64()?);
    for (what, found, most) in [("tensors", tensors, TENSORS), ("keys of metadata", keys, KEYS)] {
        if found > most {
            return Err(format!("must have at most {most} {what}, found {found}"));
        }
    }
    cursor.what = "the metadata";
    let mut metadata = BTreeMap::new();
    for _ in 0..keys {
        let key = cursor.name("a key of metadata")?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind)?;
        if metadata.contains_key(&key) {
            return Err(format!("{key} appears twice"));
        }
        metadata.insert(key, value);
    }
    let alignment = match metadata.get("general.alignment") {
        None => Some(ALIGNMENT),
        Some(Value::Unsigned(found)) => Some(*found).filter(|&found| found > 0 && found.is_multiple_of(8)),
        Some(_) => None,
    };
    let alignment = alignment.and_then(|found| u32::try_from(found).ok());
    let alignment = alignment.ok_or("general.alignment must be a u32 and a multiple of 8")? as usize;
    cursor.what = "the tensors' descriptions";
    let mut described = Vec::new();
    for _ in 0..tensors {
        described.push(cursor.tensor()?);
    }
    let data = cursor.at.checked_next_multiple_of(alignment).ok_or("general.alignment is past all bounds")?;
    let mut entries = BTreeMap::new();
    for tensor in described {
        let (name, entry) = locate(tensor, data, alignment, bytes.len())?;
        if entries.contains_key(&name) {
            return Err(format!("{name} appears twice"));
        }
        entries.insert(name, entry);
    }
    apart(&entries)?;
    Ok(Header { metadata, entries })
}

/// A tensor as the header describes it.
struct Described {
    name: String,
    shape: Vec<u64>,
    number: u32,
    offset: u64,
}

/// Finds the bytes of a tensor in the file, and checks that they lie within it.
fn locate(tensor: Described, data: usize, alignment: usize, length: usize) -> Result<(String, Entry), String> {
    let Described { name, shape, number, offset } = tensor;
    let (kind, repacked, stored) = kind(number);
    let outside = || format!("{name} lies outside the file of {length} bytes");
    let start = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(data));
    let start = start.filter(|&start| start <= length).ok_or_else(outside)?;
    if !(start - data).is_multiple_of(alignment) {
        return Err(format!("{name} must lie at a multiple of {alignment} bytes, found {offset}"));
    }
    let shape: Option<Vec<usize>> = shape.into_iter().map(|side| usize::try_from(side).ok()).collect();
    let numbers = shape.as_ref().and_then(|shape| shape.iter().try_fold(1usize, |n, &side| n.checked_mul(side)));
    let (shape, numbers) = shape.zip(numbers).ok_or_else(outside)?;
    let mut size = 0;
    let blocks = repacked.map(|from| (from.block_size(), from.type_size())).or(kind.map(WeightType::block));
    if let Some((block, block_bytes)) = blocks {
        let row = shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(format!("{name} has rows of {row} numbers, not a multiple of a {stored} block"));
        }
        size = (numbers / block).checked_mul(block_bytes).ok_or_else(outside)?;
    }
    let end = start.checked_add(size).filter(|&end| end <= length).ok_or_else(outside)?;
    Ok((name, Entry { kind, repacked, stored, shape, range: start..end, reading: Reading::Plain }))
}

/// Rejects overlapping tensors: a wrong offset that stays inside the file points into another tensor.
pub(super) fn apart(entries: &BTreeMap<String, Entry>) -> Result<(), String> {
    let mut ranges: Vec<(&Range<usize>, &String)> = entries.iter().map(|(name, entry)| (&entry.range, name)).collect();
    ranges.sort_by_key(|(range, _)| (range.start, range.end));
    match ranges.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => Err(format!("{} and {} overlap", pair[0].1, pair[1].1)),
        None => Ok(()),
    }
}

/// A cursor over the bytes of the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// The section being read, for the error when the file ends within it.
    what: &'static str,
}

impl<'a> Cursor<'a> {
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

    /// Reads a key or a tensor name.
    fn name(&mut self, what: &str) -> Result<String, String> {
        let bytes = self.string()?;
        if bytes.len() > NAME {
            return Err(format!("has {what} of {} bytes, the maximum is {NAME}", bytes.len()));
        }
        std::str::from_utf8(bytes).map(Into::into).map_err(|_| format!("has {what} that is not UTF-8"))
    }

    /// Reads a metadata value. Strings and arrays stay in the file.
    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.number()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.number()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.number()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.number()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.number()?).into()),
            // Widened through its decimal digits, as if it had been written in JSON.
            6 => Value::Float(f32::from_le_bytes(self.number()?).to_string().parse().unwrap_or(f64::NAN)),
            7 => Value::Bool(self.number::<1>()? != [0]),
            8 => {
                let length = self.string()?.len();
                Value::Text(self.at - length..self.at)
            }
            9 => self.array()?,
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.number()?)),
            12 => Value::Float(f64::from_le_bytes(self.number()?)),
            other => return Err(format!("has metadata of unknown type {other}")),
        })
    }

    fn array(&mut self) -> Result<Value, String> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let start = self.at;
        self.skip(kind, count, DEPTH)?;
        let range = start..self.at;
        Ok(match kind {
            4 | 5 => Value::Words(range),
            6 => Value::Floats(range),
            // Every string takes at least eight bytes of the file, which bounds the count.
            8 => Value::Texts(count as usize, range),
            _ => Value::Array,
        })
    }

    /// Skips `count` values of one type.
    fn skip(&mut self, kind: u32, count: u64, depth: u32) -> Result<(), String> {
        let size: u64 = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            // Every string and array takes at least eight bytes, so a count beyond the end of the file fails early.
            8 => return (0..count).try_for_each(|_| self.string().map(drop)),
            9 if depth == 0 => return Err("has arrays in arrays past all bounds".into()),
            9 => {
                return (0..count).try_for_each(|_| {
                    let (kind, count) = (self.u32()?, self.u64()?);
                    self.skip(kind, count, depth - 1)
                });
            }
            other => return Err(format!("has metadata of unknown type {other}")),
        };
        self.take(count.saturating_mul(size)).map(drop)
    }

    fn tensor(&mut self) -> Result<Described, String> {
        let name = self.name("a tensor's name")?;
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS {
            return Err(format!("{name} must have at most {DIMENSIONS} dimensions, found {dimensions}"));
        }
        // ggml lists the innermost dimension first.
        let mut shape = (0..dimensions).map(|_| self.u64()).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        Ok(Described { name, shape, number: self.u32()?, offset: self.u64()? })
    }
}
