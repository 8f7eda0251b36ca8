//! The open journal, to which every transaction appends the rows that it changes. `record.rs` defines the byte format.

use std::collections::VecDeque;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::changes::Changes;
use super::record::{Contents, DIGEST, HEADER, MAGIC, PREFIX, Position, VERSION, digest, encode, prefix, push};
use crate::session::disk::{Disk, DiskFile, OpenMode, Stream};

/// Bytes of rows after which a record of the base ends.
const PART: usize = 1 << 20;

/// The journal is rewritten once it is longer than this many times its base plus [`SMALLEST`].
const GROWTH: u64 = 4;
const SMALLEST: u64 = 16 << 20;

/// A record that has not been written yet.
pub(super) struct Record {
    pub(super) position: Position,
    bytes: Vec<u8>,
}

/// The open journal.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Arc<dyn DiskFile>,
    end: Position,
    length: u64,
    base: u64,
    /// Positions to which the index may revert after a crash, each with the journal's length there.
    recent: VecDeque<(Position, u64)>,
    /// The last position that the index is known to have committed; `None` after a failure.
    pub(super) committed: Option<Position>,
    /// Whether a write or sync has failed, so that the journal must be rewritten.
    broken: bool,
}

impl Journal {
    /// Opens a journal for appending after its `contents`.
    pub(super) fn open(disk: &dyn Disk, path: &Path, contents: &Contents) -> io::Result<Self> {
        let file = disk.open(path, OpenMode::Write)?;
        file.set_len(contents.length)?;
        Ok(Self::new(path, file, contents.end, contents.length, contents.base))
    }

    fn new(path: &Path, file: Arc<dyn DiskFile>, end: Position, length: u64, base: u64) -> Self {
        let (recent, committed) = ([(end, length)].into(), Some(end));
        Self { path: path.to_owned(), file, end, length, base, recent, committed, broken: false }
    }

    /// Writes a new journal with these rows, replacing any old one, and syncs it.
    pub(super) fn create<E: From<io::Error>>(
        disk: &dyn Disk,
        path: &Path,
        position: Position,
        rows: impl FnOnce(&mut dyn FnMut(u8, &[u8], &[u8]) -> Result<(), E>) -> Result<(), E>,
    ) -> Result<Self, E> {
        let new = path.with_extension("journal-new");
        let made = (|| {
            let file = disk.open(&new, OpenMode::Replace)?;
            let mut out = BufWriter::new(Stream::new(&*file));
            let mut header = MAGIC.to_vec();
            header.extend_from_slice(&u64::from(VERSION).to_le_bytes());
            header.extend_from_slice(&position.sequence.to_le_bytes());
            header.extend_from_slice(&position.digest.to_le_bytes());
            out.write_all(&header)?;
            let (mut length, mut chain, mut payload) = (HEADER as u64, position.digest, Vec::new());
            let mut part = |payload: &mut Vec<u8>| -> io::Result<()> {
                let prefix = prefix(payload.len(), position.sequence);
                chain = digest(chain, &prefix, payload);
                out.write_all(&prefix)?;
                out.write_all(payload)?;
                out.write_all(&chain.to_le_bytes())?;
                length += (PREFIX + payload.len() + DIGEST) as u64;
                payload.clear();
                Ok(())
            };
            rows(&mut |table, key, value| {
                push(&mut payload, (table, key), Some(value));
                if payload.len() >= PART { Ok(part(&mut payload)?) } else { Ok(()) }
            })?;
            if !payload.is_empty() {
                part(&mut payload)?;
            }
            part(&mut payload)?;
            out.flush()?;
            drop(out);
            file.sync()?;
            disk.rename(&new, path)?;
            disk.sync_folder(path.parent().unwrap_or(Path::new("")))?;
            Ok(Self::new(path, file, position, length, length))
        })();
        made.inspect_err(|_| drop(disk.remove(&new)))
    }

    /// Returns the record of these changes; `None` if there are none.
    pub(super) fn record(&self, changes: &Changes) -> Option<Record> {
        if changes.is_empty() {
            return None;
        }
        let payload = encode(changes);
        let (position, prefix) = self.end.next(&payload);
        let bytes = [&prefix[..], &payload, &position.digest.to_le_bytes()].concat();
        Some(Record { position, bytes })
    }

    /// Appends a record, without syncing it.
    pub(super) fn append(&mut self, record: &Record) -> io::Result<()> {
        if let Err(error) = self.file.write_at(&record.bytes, self.length) {
            self.broken |= self.file.set_len(self.length).is_err();
            return Err(error);
        }
        self.length += record.bytes.len() as u64;
        self.end = record.position;
        self.recent.push_back((self.end, self.length));
        Ok(())
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    /// Records that the index has committed everything and, if `durable`, that it cannot revert to an earlier position.
    pub(super) fn commit(&mut self, durable: bool) {
        self.committed = Some(self.end);
        if durable {
            self.recent = [(self.end, self.length)].into();
        }
    }

    /// Removes the transactions after `position`, which the index does not have; returns false if that is not possible.
    pub(super) fn rewind(&mut self, position: Position) -> io::Result<bool> {
        let Some(at) = self.recent.iter().position(|(known, _)| *known == position) else { return Ok(false) };
        self.recent.truncate(at + 1);
        let (end, length) = self.recent[at];
        self.file.set_len(length)?;
        // Otherwise, a power failure could bring the removed transactions back.
        self.file.sync()?;
        (self.end, self.length, self.committed) = (end, length, Some(end));
        Ok(true)
    }

    pub(super) fn break_off(&mut self) {
        self.broken = true;
    }

    /// Returns whether the index may lack the last transaction.
    pub(super) fn is_uncertain(&self) -> bool {
        self.committed != Some(self.end)
    }

    pub(super) fn must_be_rewritten(&self) -> bool {
        self.broken
    }

    /// Returns whether the journal has grown so far beyond its base that it should be rewritten.
    pub(super) fn is_large(&self) -> bool {
        self.length > self.base.saturating_mul(GROWTH).saturating_add(SMALLEST)
    }

    /// Lets the journal grow by the same factor again before it is rewritten.
    pub(super) fn postpone(&mut self) {
        self.base = self.length;
    }

    pub(super) fn end(&self) -> Position {
        self.end
    }

    /// Returns whether the path still leads to the open file.
    pub(super) fn is_in_place(&self) -> io::Result<bool> {
        self.file.is_at(&self.path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}
