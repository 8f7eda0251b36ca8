//! Finds the files in an uncompressed zip archive in memory. Every number is checked before it is used, and memory use
//! is bounded by the length of the archive's directory.

use std::collections::BTreeMap;
use std::ops::Range;

/// The maximum number of files; models have a few hundred or a few thousand.
const FILES: u64 = 1 << 16;
/// The lengths of the end-of-directory record and of the longest comment that may follow it.
const END: usize = 22;
const COMMENT: usize = 0xffff;
/// A 32-bit field with this value means that the number is in a zip64 field.
const LARGE: u64 = 0xffff_ffff;

/// The byte ranges of the files, by name.
pub(super) fn files(bytes: &[u8]) -> Result<BTreeMap<String, Range<usize>>, String> {
    let (count, start) = directory(bytes).ok_or("has no whole directory of files at its end")?;
    if count > FILES {
        return Err(format!("has {count} files, the maximum is {FILES}"));
    }
    let mut files = BTreeMap::new();
    let mut rest = usize::try_from(start).ok().and_then(|start| bytes.get(start..)).unwrap_or_default();
    for at in 0..count {
        let broken = || format!("has a broken directory: file {at}");
        let header = Header::read(rest).ok_or_else(broken)?;
        let name = std::str::from_utf8(header.name).map_err(|_| broken())?;
        if header.method != 0 || header.flags & 1 != 0 || header.packed != header.size {
            return Err(format!("{name} must be stored as it is, without compression or encryption"));
        }
        let range =
            header.range(bytes).ok_or_else(|| format!("{name} lies outside the file of {} bytes", bytes.len()))?;
        if files.insert(name.to_owned(), range).is_some() {
            return Err(format!("{name} appears twice in the archive"));
        }
        rest = header.after;
    }
    Ok(files)
}

fn number(bytes: &[u8], at: usize, width: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(width)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Returns the number of files and the offset of the directory.
fn directory(bytes: &[u8]) -> Option<(u64, u64)> {
    let last = bytes.len().checked_sub(END)?;
    let is_end = |at: &usize| {
        bytes[*at..].starts_with(b"PK\x05\x06") && number(bytes, at + 20, 2) == Some((bytes.len() - at - END) as u64)
    };
    let end = (last.saturating_sub(COMMENT)..=last).rev().find(is_end)?;
    let (count, start) = (number(bytes, end + 10, 2)?, number(bytes, end + 16, 4)?);
    if count < 0xffff && start < LARGE {
        return Some((count, start));
    }
    let locator = bytes.get(end.checked_sub(20)?..end)?;
    let record = usize::try_from(number(locator, 8, 8).filter(|_| locator.starts_with(b"PK\x06\x07"))?).ok()?;
    let record = bytes.get(record..).filter(|record| record.starts_with(b"PK\x06\x06"))?;
    Some((number(record, 32, 8)?, number(record, 48, 8)?))
}

/// A directory entry.
struct Header<'a> {
    flags: u64,
    method: u64,
    packed: u64,
    size: u64,
    /// The offset of the file's local header.
    start: u64,
    name: &'a [u8],
    after: &'a [u8],
}

impl<'a> Header<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let field = |at: usize, width: usize| number(bytes, at, width).filter(|_| bytes.starts_with(b"PK\x01\x02"));
        let length = |at: usize| field(at, 2).map(|length| length as usize);
        let (name, extra) = bytes.get(46..)?.split_at_checked(length(28)?)?;
        let (extra, comment) = extra.split_at_checked(length(30)?)?;
        let mut numbers = [field(24, 4)?, field(20, 4)?, field(42, 4)?];
        let mut large = large(extra);
        for number in numbers.iter_mut().filter(|number| **number == LARGE) {
            let (first, rest) = large.split_first_chunk::<8>()?;
            (*number, large) = (u64::from_le_bytes(*first), rest);
        }
        let [size, packed, start] = numbers;
        let after = comment.get(length(32)?..)?;
        Some(Self { flags: field(8, 2)?, method: field(10, 2)?, packed, size, start, name, after })
    }

    /// The range of the file's bytes, which follow its local header.
    fn range(&self, bytes: &[u8]) -> Option<Range<usize>> {
        let start = usize::try_from(self.start).ok()?;
        let header = bytes.get(start..).filter(|header| header.starts_with(b"PK\x03\x04"))?;
        let lengths = number(header, 26, 2)? + number(header, 28, 2)?;
        let start = start.checked_add(30)?.checked_add(lengths as usize)?;
        let end = start.checked_add(usize::try_from(self.size).ok()?).filter(|&end| end <= bytes.len())?;
        Some(start..end)
    }
}

/// Returns the zip64 field, which holds 64-bit numbers.
fn large(mut extra: &[u8]) -> &[u8] {
    while let (Some(kind), Some(length)) = (number(extra, 0, 2), number(extra, 2, 2)) {
        let Some((field, rest)) = extra[4..].split_at_checked(length as usize) else { break };
        if kind == 1 {
            return field;
        }
        extra = rest;
    }
    &[]
}
