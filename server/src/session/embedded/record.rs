//! The byte format of the journal, and its reader. The journal is a second copy of the index: a file to which every
//! transaction appends the rows that it changes. Another process can read it while the server writes it, and the index
//! can be rebuilt from it.
//!
//! All numbers are little-endian. The header has 32 bytes: the magic, u32 format version, u32 zero, and the position of
//! the base (u64 sequence number, u64 digest). A record is: u32 length of the payload, u64 sequence number, the
//! payload, and a u64 digest, which is the first bytes of SHA-256 of the previous digest, length, number and payload.
//! The records of the base have the base's number and together hold every row; an empty record ends them, and the
//! digest chain then continues from the base's digest. Each later record is one transaction, with the next number. A
//! payload is a list of changes: u8 table, u32 length of the key, the key, u32 length of the value (all ones if the row
//! is removed), the value.

use std::collections::BTreeMap;
use std::io::{self, BufReader, ErrorKind, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::changes::{Changes, RowKey, TEXTS};
use super::error::IndexError;
use super::place::later;
use crate::session::disk::{Disk, DiskFile, OpenMode, Stream};
use crate::session::error::StoreError;

pub(super) const MAGIC: [u8; 8] = *b"TIDEJRNL";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER: usize = 32;

/// Bytes of a record before its payload: the length and the sequence number.
pub(super) const PREFIX: usize = 12;
pub(super) const DIGEST: usize = 8;

/// The length that marks a removed row.
const REMOVED: u32 = u32::MAX;

/// A point in the history of the index: the number of a transaction, and the digest of everything up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(super) sequence: u64,
    pub(super) digest: u64,
}

impl Position {
    pub(super) fn next(self, payload: &[u8]) -> (Self, [u8; PREFIX]) {
        let sequence = self.sequence.wrapping_add(1);
        let prefix = prefix(payload.len(), sequence);
        (Self { sequence, digest: digest(self.digest, &prefix, payload) }, prefix)
    }
}

pub(super) fn prefix(length: usize, sequence: u64) -> [u8; PREFIX] {
    let mut prefix = [0; PREFIX];
    prefix[..4].copy_from_slice(&(length as u32).to_le_bytes());
    prefix[4..].copy_from_slice(&sequence.to_le_bytes());
    prefix
}

pub(super) fn digest(previous: u64, prefix: &[u8; PREFIX], payload: &[u8]) -> u64 {
    let hash = Sha256::new().chain_update(previous.to_le_bytes()).chain_update(prefix).chain_update(payload).finalize();
    hash.iter().take(DIGEST).rev().fold(0, |digest, byte| digest << 8 | u64::from(*byte))
}

pub(super) fn push(payload: &mut Vec<u8>, (table, key): (u8, &[u8]), value: Option<&[u8]>) {
    payload.push(table);
    payload.extend_from_slice(&(key.len() as u32).to_le_bytes());
    payload.extend_from_slice(key);
    payload.extend_from_slice(&value.map_or(REMOVED, |value| value.len() as u32).to_le_bytes());
    payload.extend_from_slice(value.unwrap_or_default());
}

pub(super) fn encode(changes: &Changes) -> Vec<u8> {
    let mut payload = Vec::new();
    for ((table, key), value) in changes {
        push(&mut payload, (*table, key), value.as_deref());
    }
    payload
}

/// Returns the changes in a payload; `None` if it is not a well-formed list of changes.
fn decode(mut payload: &[u8]) -> Option<Changes> {
    let mut changes = Changes::new();
    while let Some((table, rest)) = payload.split_first() {
        let (length, rest) = rest.split_first_chunk()?;
        let (key, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let (length, rest) = rest.split_first_chunk()?;
        let (value, rest) = match u32::from_le_bytes(*length) {
            REMOVED => (None, rest),
            length => rest.split_at_checked(length as usize).map(|(value, rest)| (Some(value), rest))?,
        };
        changes.insert((*table, key.to_vec()), value.map(<[u8]>::to_vec));
        payload = rest;
    }
    Some(changes)
}

/// A transaction in the journal.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(super) position: Position,
    /// Where the transaction's record ends in the file.
    pub(super) end: u64,
    pub(super) changes: Changes,
}

/// How to read the rows of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    Whole,
    /// Every row goes through [`abridged`], because all texts together may not fit in memory.
    Abridged,
}

/// Returns the digest of a text's row instead of the row; any other row unchanged.
pub(super) fn abridged(table: u8, value: Vec<u8>) -> Vec<u8> {
    if table == TEXTS { Sha256::digest(&value).to_vec() } else { value }
}

/// The contents of a journal.
#[derive(Debug)]
pub(crate) struct Contents {
    /// All rows after the last transaction; texts may be [abridged](Rows).
    pub(crate) rows: BTreeMap<RowKey, Vec<u8>>,
    /// The last whole transaction, and where it ends.
    pub(super) end: Position,
    pub(crate) length: u64,
    /// Where the base ends.
    pub(super) base: u64,
    /// Bytes after the last whole transaction: a write that a crash cut short, or damage.
    pub(crate) rest: u64,
    /// Where the record of the given position ends in the file.
    pub(super) before_after: u64,
    /// The transactions after the given position; `None` if the journal does not have that position.
    pub(super) after: Option<Vec<Entry>>,
}

/// Why a journal cannot be read.
#[derive(Debug)]
pub(crate) enum JournalError {
    /// The disk failed.
    Io(io::Error),
    /// A later version of the server wrote it; the number is the version of its format.
    Later(u32),
}

impl From<io::Error> for JournalError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl JournalError {
    pub(crate) fn into_store_error(self, path: &Path) -> StoreError {
        match self {
            Self::Io(error) => StoreError::from_io(&format!("reading {} failed", path.display()), &error),
            Self::Later(found) => later(path, found.into(), VERSION.into()),
        }
    }

    pub(super) fn into_index_error(self, path: &Path) -> IndexError {
        match self {
            Self::Io(error) => error.into(),
            Self::Later(_) => IndexError::Refused(self.into_store_error(path)),
        }
    }
}

/// Reads a journal, returning the transactions after `position` separately; `None` if there is no journal, or no whole
/// base.
pub(super) fn read(
    disk: &dyn Disk,
    path: &Path,
    position: Option<Position>,
    rows: Rows,
) -> Result<Option<Contents>, JournalError> {
    match disk.open(path, OpenMode::Read) {
        Ok(file) => read_after(&*file, position, rows),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Like [`read`], but reads what has been written so far to an open file. The rows of texts are abridged.
pub(crate) fn read_file(file: &dyn DiskFile) -> Result<Option<Contents>, JournalError> {
    read_after(file, None, Rows::Abridged)
}

fn read_after(file: &dyn DiskFile, position: Option<Position>, rows: Rows) -> Result<Option<Contents>, JournalError> {
    let length = file.len()?;
    let mut file = BufReader::with_capacity(1 << 16, Stream::new(file));
    let mut header = [0; HEADER];
    if length < HEADER as u64 {
        return Ok(None);
    }
    file.read_exact(&mut header)?;
    let number = |at: usize| header[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    if header[..8] != MAGIC {
        return Ok(None);
    }
    match u32::try_from(number(8)) {
        Ok(VERSION) => {}
        Ok(later) if later > VERSION => return Err(JournalError::Later(later)),
        _ => return Ok(None),
    }
    let start = Position { sequence: number(16), digest: number(24) };
    let mut contents = Contents {
        rows: BTreeMap::new(),
        end: start,
        length: HEADER as u64,
        base: 0,
        rest: 0,
        before_after: 0,
        after: (position == Some(start)).then(Vec::new),
    };
    let (mut chain, mut in_base) = (start.digest, true);
    while let Some((sequence, payload, found)) = record(&mut file, length - contents.length, chain)? {
        let expected = if in_base { start.sequence } else { contents.end.sequence.wrapping_add(1) };
        let Some(changes) = decode(&payload).filter(|_| sequence == expected) else { break };
        contents.length += (PREFIX + payload.len() + DIGEST) as u64;
        chain = found;
        if in_base && payload.is_empty() {
            (in_base, chain, contents.base) = (false, start.digest, contents.length);
            contents.before_after = contents.length;
            continue;
        }
        if !in_base {
            contents.end = Position { sequence, digest: found };
        }
        if !in_base && let Some(after) = &mut contents.after {
            after.push(Entry { position: contents.end, end: contents.length, changes: changes.clone() });
        }
        contents.change(changes, rows);
        if !in_base && position == Some(contents.end) {
            (contents.after, contents.before_after) = (Some(Vec::new()), contents.length);
        }
    }
    contents.rest = length - contents.length;
    Ok((!in_base).then_some(contents))
}

impl Contents {
    fn change(&mut self, changes: Changes, rows: Rows) {
        for (row, value) in changes {
            match value {
                Some(value) if rows == Rows::Abridged => {
                    let value = abridged(row.0, value);
                    self.rows.insert(row, value);
                }
                Some(value) => drop(self.rows.insert(row, value)),
                None => drop(self.rows.remove(&row)),
            }
        }
    }
}

/// Reads the next record's number, payload and digest; `None` if the remaining bytes do not hold a whole record.
fn record(file: &mut impl Read, remaining: u64, chain: u64) -> io::Result<Option<(u64, Vec<u8>, u64)>> {
    let least = (PREFIX + DIGEST) as u64;
    if remaining < least {
        return Ok(None);
    }
    let mut prefix = [0; PREFIX];
    file.read_exact(&mut prefix)?;
    let [l0, l1, l2, l3, sequence @ ..] = prefix;
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    if u64::from(length) > remaining - least {
        return Ok(None);
    }
    let mut payload = vec![0; length as usize];
    file.read_exact(&mut payload)?;
    let mut found = [0; DIGEST];
    file.read_exact(&mut found)?;
    let found = u64::from_le_bytes(found);
    Ok((digest(chain, &prefix, &payload) == found).then_some((u64::from_le_bytes(sequence), payload, found)))
}
