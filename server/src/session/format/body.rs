//! The body of a snapshot file: its tensors as a safetensors blob.

use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use serde::Deserialize;
use tidegate_model::StateLayout;

use super::error::shown;
use super::{Codec, FormatError};
use crate::session::Snapshot;

/// Bytes of the longest tensor header: five tensors with numbers of 20 digits take fewer.
pub(super) const TENSOR_HEADER: usize = 1024;

/// Bytes of the length in front of it.
pub(super) const LENGTH: usize = 8;

/// Bytes of one pair of token and count.
pub(super) const PAIR: usize = 8;

/// A tensor of the blob, as its header has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// All tensors that a blob may have. A blob's own reader takes any, and the last of those with one name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    memory: Option<Entry>,
    conv: Option<Entry>,
    cross: Option<Entry>,
    source: Option<Entry>,
    counts: Entry,
}

/// The checked bytes of a blob's tensors; nothing is copied yet.
pub(super) struct Body<'a> {
    memory: &'a [u8],
    conv: &'a [u8],
    cross: &'a [u8],
    source: &'a [u8],
    counts: &'a [u8],
}

/// The bytes in front of the tensors' numbers: safetensors orders by type, then name.
pub(super) fn write_header(layout: &StateLayout, snapshot: &Snapshot) -> Vec<u8> {
    let mut tensors: Vec<(String, TensorInfo)> = Vec::new();
    let mut push = |name: &str, dtype: Dtype, shape: &[usize]| {
        let start = tensors.last().map_or(0, |(_, before)| before.data_offsets.1);
        let end = start + shape.iter().product::<usize>() * 4;
        tensors.push((name.to_owned(), TensorInfo { dtype, shape: shape.to_vec(), data_offsets: (start, end) }));
    };
    if snapshot.read > 0 {
        if layout.conv() > 0 {
            push("conv", Dtype::F32, &conv_shape(layout));
        }
        if layout.source() > 0 {
            push("cross", Dtype::F32, &cross_shape(layout));
        }
        push("memory", Dtype::F32, &memory_shape(layout));
        if layout.source() > 0 {
            push("source", Dtype::F32, &SOURCE);
        }
    }
    push("counts", Dtype::U32, &[snapshot.sampler.counts.len(), 2]);
    let metadata = Metadata::new(None, tensors).expect("each tensor begins where the one before ends");
    let mut json = serde_json::to_vec(&metadata).expect("strings and numbers become JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}

/// The numbers behind the header, in its order.
pub(super) fn write_numbers(layout: &StateLayout, snapshot: &Snapshot, out: &mut Vec<u8>) {
    if snapshot.read > 0 {
        let (memory, rest) = snapshot.state.split_at(layout.memory());
        let (conv, rest) = rest.split_at(layout.conv());
        let (cross, source) = rest.split_at(layout.source().saturating_sub(1));
        out.extend([conv, cross, memory, source].into_iter().flatten().flat_map(|number| number.to_le_bytes()));
    }
    out.extend(
        snapshot.sampler.counts.iter().flat_map(|(token, times)| [token.to_le_bytes(), times.to_le_bytes()].concat()),
    );
}

impl<'a> Body<'a> {
    /// The tensors of `bytes`, once they are those of a snapshot of `read` tokens.
    pub(super) fn read(bytes: &'a [u8], codec: &Codec, read: u64) -> Result<Self, FormatError> {
        let Codec { layout, vocab_size, greatest, sources, .. } = codec;
        let unread = |error: &dyn std::fmt::Display| FormatError::Tensors(shown(&error.to_string()));
        // Their own header is bounded and has five names before its reader, which would take 100 MB, sees it.
        let (length, rest) = bytes.split_first_chunk().ok_or_else(|| unread(&"the body has fewer than 8 bytes"))?;
        let length = u64::from_le_bytes(*length);
        let refused = FormatError::TensorHeaderLength { found: length, most: TENSOR_HEADER };
        let (json, data) = usize::try_from(length)
            .ok()
            .filter(|&length| length <= TENSOR_HEADER)
            .and_then(|length| rest.split_at_checked(length))
            .ok_or(refused)?;
        let entries: Entries = serde_json::from_slice(json).map_err(|error| unread(&error))?;
        // From here on the offsets follow each other, cover the data, and fit the shapes.
        SafeTensors::read_metadata(bytes).map_err(|error| unread(&error))?;

        let (has_conv, has_source) = (read > 0 && layout.conv() > 0, read > 0 && layout.source() > 0);
        let body = Self {
            memory: floats("memory", entries.memory, &memory_shape(layout), read > 0, read, data)?,
            conv: floats("conv", entries.conv, &conv_shape(layout), has_conv, read, data)?,
            cross: floats("cross", entries.cross, &cross_shape(layout), has_source, read, data)?,
            source: floats("source", entries.source, &SOURCE, has_source, read, data)?,
            counts: counts(&entries.counts, *vocab_size, data)?,
        };
        finite("memory", body.memory)?;
        finite("conv", body.conv)?;
        finite("cross", body.cross)?;
        source(body.source, read.min(*sources as u64))?;
        maxima(layout, greatest, body.memory)?;
        Ok(body)
    }

    /// The numbers of the state: all memories, then all inputs of convolutions, then what is kept of the source, and its
    /// length.
    pub(super) fn state(&self) -> Vec<f32> {
        [self.memory, self.conv, self.cross, self.source].into_iter().flat_map(numbers).collect()
    }

    pub(super) fn counts(&self) -> Vec<(u32, u32)> {
        pairs(self.counts).collect()
    }
}

fn memory_shape(layout: &StateLayout) -> [usize; 3] {
    [layout.layers, layout.heads, layout.head]
}

fn conv_shape(layout: &StateLayout) -> [usize; 3] {
    [layout.layers, layout.taps, layout.channels]
}

fn cross_shape(layout: &StateLayout) -> [usize; 3] {
    [layout.layers, layout.heads, layout.cross]
}

/// The shape of the number of the source's tokens.
const SOURCE: [usize; 1] = [1];

/// The bytes of a tensor of the state, which is there exactly where it is `expected`.
fn floats<'a>(
    tensor: &'static str,
    entry: Option<Entry>,
    shape: &[usize],
    expected: bool,
    read: u64,
    data: &'a [u8],
) -> Result<&'a [u8], FormatError> {
    if entry.is_some() != expected {
        return Err(FormatError::Presence { tensor, expected: if expected { "present" } else { "absent" }, read });
    }
    let Some(entry) = entry else { return Ok(&[]) };
    dtype(&entry, Dtype::F32, "F32")?;
    if entry.shape != shape {
        let (found, expected) = (shown(&format!("{:?}", entry.shape)), format!("{shape:?}"));
        return Err(FormatError::Shape { tensor, found, expected });
    }
    Ok(&data[entry.data_offsets.0..entry.data_offsets.1])
}

fn counts<'a>(entry: &Entry, vocab_size: usize, data: &'a [u8]) -> Result<&'a [u8], FormatError> {
    dtype(entry, Dtype::U32, "U32")?;
    if !matches!(entry.shape[..], [rows, 2] if rows <= vocab_size) {
        let found = shown(&format!("{:?}", entry.shape));
        let expected = format!("[n, 2] with n at most {vocab_size}");
        return Err(FormatError::Shape { tensor: "counts", found, expected });
    }
    let bytes = &data[entry.data_offsets.0..entry.data_offsets.1];
    let mut before = None;
    for (found, _) in pairs(bytes) {
        if found as usize >= vocab_size {
            return Err(FormatError::CountsToken { found, vocab_size });
        }
        match before {
            Some(before) if before >= found => return Err(FormatError::CountsOrder { found, before }),
            _ => before = Some(found),
        }
    }
    Ok(bytes)
}

fn dtype(entry: &Entry, dtype: Dtype, expected: &'static str) -> Result<(), FormatError> {
    if entry.dtype == dtype {
        return Ok(());
    }
    Err(FormatError::Dtype { found: entry.dtype.to_string(), expected })
}

fn finite(tensor: &'static str, bytes: &[u8]) -> Result<(), FormatError> {
    match numbers(bytes).position(|number| !number.is_finite()) {
        Some(at) => Err(FormatError::NotFinite { tensor, at }),
        None => Ok(()),
    }
}

/// Refuses a length that no source of at most `most` tokens has, where there is one.
fn source(bytes: &[u8], most: u64) -> Result<(), FormatError> {
    // Exact: the longest source is far below 2^24.
    let holds = |tokens: &f32| tokens.fract() == 0.0 && (1.0..=most as f32).contains(tokens);
    match numbers(bytes).find(|tokens| !holds(tokens)) {
        Some(found) => Err(FormatError::Source { found: found.to_string(), most }),
        None => Ok(()),
    }
}

/// Refuses a maximum that no keys have: it would outweigh all that are to come. It is the last number of each head.
fn maxima(layout: &StateLayout, greatest: &[f32], memory: &[u8]) -> Result<(), FormatError> {
    let head = layout.head.max(1);
    let maxima = numbers(memory).enumerate().skip(head - 1).step_by(head).zip(greatest);
    for ((at, found), most) in maxima {
        if found > *most {
            return Err(FormatError::Maximum { at, most: most.to_string(), found: found.to_string() });
        }
    }
    Ok(())
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number))
}

fn pairs(bytes: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    let (numbers, _) = bytes.as_chunks().0.as_chunks::<2>();
    numbers.iter().map(|&[token, times]| (u32::from_le_bytes(token), u32::from_le_bytes(times)))
}
