//! The body of a snapshot file: its tensors, as a safetensors blob.

use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo};
use serde::Deserialize;
use tidegate_model::StateLayout;

use super::codec::Codec;
use super::error::FormatError;
use super::error::shown;
use crate::session::snapshot::Snapshot;

/// Maximum length of the tensor header in bytes. Five tensors with numbers of 20 digits need less.
pub(super) const MAX_TENSOR_HEADER: usize = 1024;

/// Size in bytes of the length field before the tensor header.
pub(super) const LENGTH: usize = 8;

/// Bytes of a token and its count.
pub(super) const PAIR: usize = 8;

/// A tensor entry in the blob's header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// All tensors that a blob may contain. The safetensors reader would accept others, and duplicate names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    memory: Option<Entry>,
    conv: Option<Entry>,
    cross: Option<Entry>,
    source: Option<Entry>,
    counts: Entry,
}

/// The checked bytes of the tensors, not copied yet.
pub(super) struct Body<'a> {
    memory: &'a [u8],
    conv: &'a [u8],
    cross: &'a [u8],
    source: &'a [u8],
    counts: &'a [u8],
}

/// Returns the length and header of the blob. Like safetensors, it orders tensors by type, then by name.
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
    let metadata = Metadata::new(None, tensors).expect("the tensors are contiguous");
    let mut json = serde_json::to_vec(&metadata).expect("strings and numbers always serialise");
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}

/// Writes the numbers after the header, in the header's order.
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
    /// Returns the number of tokens of the source; 0 if there is none.
    pub(super) fn source_tokens(&self) -> usize {
        self.source.first_chunk().map_or(0, |bytes| f32::from_le_bytes(*bytes) as usize)
    }

    /// Checks the tensors of a snapshot of `read` tokens.
    pub(super) fn read(bytes: &'a [u8], codec: &Codec, read: u64) -> Result<Self, FormatError> {
        let Codec { layout, vocab_size, greatest, sources, .. } = codec;
        let unread = |error: &dyn std::fmt::Display| FormatError::Tensors(shown(&error.to_string()));
        // Check the header's length and names before the safetensors reader sees it, because that reader would accept
        // up to 100 MB.
        let (length, rest) = bytes.split_first_chunk().ok_or_else(|| unread(&"the body has fewer than 8 bytes"))?;
        let length = u64::from_le_bytes(*length);
        let refused = FormatError::TensorHeaderLength { found: length, max: MAX_TENSOR_HEADER };
        let (json, data) = usize::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_TENSOR_HEADER)
            .and_then(|length| rest.split_at_checked(length))
            .ok_or(refused)?;
        let entries: Entries = serde_json::from_slice(json).map_err(|error| unread(&error))?;
        // This checks that the offsets are contiguous, cover the data, and fit the shapes.
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

    /// Returns the numbers of the state: all memories, all convolution inputs, the cross-attention memories and the
    /// source's length.
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

/// The shape of the tensor that holds the source's length.
const SOURCE: [usize; 1] = [1];

/// Returns the bytes of a tensor of the state. The tensor must be present if and only if it is `expected`.
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

/// Refuses a source length that is not a whole number from 1 to `max`.
fn source(bytes: &[u8], max: u64) -> Result<(), FormatError> {
    // `f32` is exact here: the longest source is far below 2^24 tokens.
    let holds = |tokens: &f32| tokens.fract() == 0.0 && (1.0..=max as f32).contains(tokens);
    match numbers(bytes).find(|tokens| !holds(tokens)) {
        Some(found) => Err(FormatError::Source { found: found.to_string(), max }),
        None => Ok(()),
    }
}

/// Refuses a key maximum that no key can reach, because it would outweigh all later keys. The maximum is the last
/// number of each head.
fn maxima(layout: &StateLayout, greatest: &[f32], memory: &[u8]) -> Result<(), FormatError> {
    let head = layout.head.max(1);
    let maxima = numbers(memory).enumerate().skip(head - 1).step_by(head).zip(greatest);
    for ((at, found), max) in maxima {
        if found > *max {
            return Err(FormatError::Maximum { at, max: max.to_string(), found: found.to_string() });
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
