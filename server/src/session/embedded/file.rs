//! The redb file: creating it, opening it, and telling damage from other failures.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use redb::backends::InMemoryBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable as _, StorageBackend};

use super::error::IndexError;
use super::place::{Place, later};
use super::tables::{Access, Tables};
use crate::session::disk::{DiskFile, OpenMode};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::Totals;

/// Bytes that redb caches in memory, in addition to the store's budget.
const CACHE: usize = 64 << 20;

/// The reason reported when a panic inside redb counts as damage.
pub(super) const PANICKED: &str = "reading it caused a panic";

/// Why the index could not be opened.
pub(super) enum Failed {
    /// The file's content is damaged.
    Damaged(String),
    /// Any other cause, such as another process that has the file open.
    Store(StoreError),
}

impl From<IndexError> for Failed {
    fn from(error: IndexError) -> Self {
        match error {
            // A full or failing disk does not mean that the file is damaged.
            IndexError::Broken(redb::Error::Io(ref io)) if !is_damage(io) => Self::Store(error.to_store_error()),
            IndexError::Broken(error) => Self::Damaged(error.to_string()),
            IndexError::Row(reason) => Self::Damaged(reason),
            IndexError::Refused(error) => Self::Store(error),
        }
    }
}

impl Failed {
    pub(super) fn reason(self) -> String {
        match self {
            Self::Damaged(reason) => reason,
            Self::Store(error) => error.to_string(),
        }
    }

    pub(super) fn into_store_error(self, place: &Place) -> StoreError {
        match self {
            Self::Damaged(reason) => damaged(place, &reason),
            Self::Store(error) => error,
        }
    }
}

/// A file of a disk, as redb's storage backend. Its lock is taken when the index is opened, and released with the file.
#[derive(Debug)]
struct Backend(Arc<dyn DiskFile>);

impl StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_at(out, offset)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(data, offset)
    }
}

/// Creates the file atomically: a process that dies while it does so leaves none.
pub(super) fn create_file(place: &Place, sync: bool) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::from_io("creating the index failed", &error);
    drop(create_new(place)?);
    place.disk.rename(&place.path.with_extension(NEW), &place.path).map_err(failed)?;
    if sync { place.sync_folder().map_err(failed) } else { Ok(()) }
}

/// The extension of an index file that is not complete yet.
pub(super) const NEW: &str = "new";

/// Creates an empty index under a temporary name.
pub(super) fn create_new(place: &Place) -> Result<Database, StoreError> {
    let failed = |error: io::Error| StoreError::from_io("creating the index failed", &error);
    let file = place.disk.open(&place.path.with_extension(NEW), OpenMode::Replace).map_err(failed)?;
    let created = builder().create_with_backend(Backend(file));
    created.map_err(|error| IndexError::Broken(error.into()).to_store_error())
}

fn builder() -> redb::Builder {
    let mut builder = redb::Builder::new();
    builder.set_cache_size(CACHE);
    builder
}

/// Creates an empty index in memory.
pub(super) fn in_memory() -> Result<Database, StoreError> {
    let created = builder().create_with_backend(InMemoryBackend::new());
    created.map_err(|error| IndexError::Broken(error.into()).to_store_error())
}

/// Opens the file and locks it, because servers of earlier versions lock it too.
pub(super) fn connect(place: &Place) -> Result<Database, Failed> {
    let open = || -> io::Result<_> {
        let file = place.disk.open(&place.path, OpenMode::Write)?;
        let mut header = vec![0; HEADER.min(file.len()? as usize)];
        file.read_at(&mut header, 0)?;
        Ok((file, header))
    };
    let (file, header) = open().map_err(|error| Failed::from(IndexError::from(error)))?;
    place.take(&*file).map_err(Failed::Store)?;
    if header.is_empty() {
        return Err(Failed::Damaged("it is empty".to_owned()));
    }
    if let Some(found) = later_redb(&header) {
        return Err(Failed::Store(later(&place.path, found.into(), REDB_VERSION.into())));
    }
    let database = match catch_unwind(AssertUnwindSafe(|| builder().create_with_backend(Backend(file)))) {
        Ok(Ok(database)) => database,
        Ok(Err(DatabaseError::Storage(redb::StorageError::Io(error)))) if !is_damage(&error) => {
            return Err(Failed::Store(IndexError::Broken(redb::Error::Io(error)).to_store_error()));
        }
        Ok(Err(error)) => return Err(Failed::Damaged(error.to_string())),
        Err(_) => return Err(Failed::Damaged(PANICKED.to_owned())),
    };
    let read = || Tables::format(&database.begin_read()?);
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(found)) if found > FORMAT => Err(Failed::Store(later(&place.path, found, FORMAT))),
        // If the version cannot be read, the file is damaged; the check of its pages detects that.
        _ => Ok(database),
    }
}

/// The version of the rows and tables. An index without a version number has version 1.
pub(super) const FORMAT: u64 = 1;

/// redb's file format version, the magic bytes of its files, and where the two commit slots hold the version.
const REDB_VERSION: u8 = 3;
const MAGIC: &[u8] = b"redb\x1a\x0a\xa9\x0d\x0a";
const SLOTS: [usize; 2] = [64, 192];
const HEADER: usize = 320;

/// Returns the format version of a file written by a later version of redb. Both slots must agree; damage would change
/// only one.
fn later_redb(header: &[u8]) -> Option<u8> {
    let [first, second] = SLOTS.map(|at| header.get(at).copied().unwrap_or(0));
    (header.starts_with(MAGIC) && first.min(second) > REDB_VERSION).then_some(first)
}

/// Returns whether an I/O error concerns the content of the file rather than the disk.
pub(super) fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}

pub(super) fn damaged(place: &Place, reason: &str) -> StoreError {
    let bytes = place.disk.open(&place.path, OpenMode::Read).and_then(|file| file.len()).unwrap_or(0);
    place.refusal(format!(
        "its {bytes} bytes are damaged ({reason}); restore it from a backup or, to start without its sessions, move the \
         whole folder away"
    ))
}

pub(super) fn totals(database: &Database) -> Result<Totals, IndexError> {
    let work = || read_totals(&Tables::reading(&database.begin_read()?)?);
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()))
}

pub(super) fn read_totals<A: Access>(tables: &Tables<A>) -> Result<Totals, IndexError> {
    let mut totals = Totals {
        live: tables.total("live")?,
        garbage: tables.total("garbage")?,
        sessions: tables.total("sessions")?,
        versions: tables.total("versions")?,
        evictable: tables.evictable_owners()?,
        ..Totals::default()
    };
    for entry in tables.owners.iter()? {
        let (owner, row) = entry?;
        totals.owners.insert(Owner(*owner.value()), row.value().0);
    }
    for entry in tables.receipt_bytes.iter()? {
        let (owner, bytes) = entry?;
        totals.receipts += bytes.value();
        *totals.owners.entry(Owner(*owner.value())).or_default() += bytes.value();
    }
    for entry in tables.text_bytes.iter()? {
        let (owner, bytes) = entry?;
        totals.texts += bytes.value();
        *totals.owners.entry(Owner(*owner.value())).or_default() += bytes.value();
    }
    Ok(totals)
}

pub(super) fn panicked() -> IndexError {
    IndexError::Broken(redb::Error::Corrupted(PANICKED.to_owned()))
}
