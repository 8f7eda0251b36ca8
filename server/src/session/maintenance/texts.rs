//! The texts of a session as a file: `TIDETEXT`; then for each version, ancestors first, u16 length of its id, the id,
//! u32 length of its row, and the row as in the index; at the end, SHA-256 of everything before it. Numbers are
//! little-endian.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::session::id::VersionId;

const MAGIC: &[u8] = b"TIDETEXT";
const DIGEST: usize = 32;

/// Returns the file with these rows, each with its version.
pub(super) fn encode(rows: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for (id, row) in rows {
        bytes.extend((id.len() as u16).to_le_bytes());
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend((row.len() as u32).to_le_bytes());
        bytes.extend_from_slice(row);
    }
    bytes.extend_from_slice(&Sha256::digest(&bytes));
    bytes
}

/// Reads the rows of a file, each with its version. A missing file has no rows, as in an export of an earlier version.
pub(super) fn read(path: &Path) -> Result<Vec<(String, Vec<u8>)>, String> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    parse(&bytes).ok_or_else(|| format!("{} is damaged", path.display()))
}

fn parse(bytes: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let (content, digest) = bytes.split_at_checked(bytes.len().checked_sub(DIGEST)?)?;
    if Sha256::digest(content)[..] != *digest {
        return None;
    }
    let (mut rest, mut rows) = (content.strip_prefix(MAGIC)?, Vec::new());
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk()?;
        let (id, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
        let (length, after) = after.split_first_chunk()?;
        let (row, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let id = VersionId::parse(std::str::from_utf8(id).ok()?)?;
        rows.push((id.to_string(), row.to_vec()));
        rest = after;
    }
    Some(rows)
}
