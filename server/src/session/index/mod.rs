//! The index: which sessions there are and which versions they point to, in one file of redb. It holds no snapshot.

mod ends;
mod ledger;
mod room;
mod rows;
mod tables;
mod write;
mod writer;

use std::fmt;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use redb::backends::InMemoryBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable as _};

pub(crate) use ledger::{Bounds, Ledger, Reservation, Short, Sums};
pub(crate) use rows::{ResponseRow, SessionRow, VersionRow};
pub(crate) use tables::{Reading, Tables};
pub(crate) use write::Write;
pub(crate) use writer::Writer;

use super::{Owner, StoreError};

/// How long an index that is just being closed, by the store before in this process, is waited for.
const CLOSING: Duration = Duration::from_secs(3);

/// Bytes of the file that redb holds in memory, beside the store's budget.
const CACHE: usize = 64 << 20;

/// Why a transaction, or a part of it, came to nothing.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The request cannot be; others in the same transaction can.
    Refused(StoreError),
    /// A row is not as this program wrote it; others may be.
    Row(String),
    /// The index itself failed.
    Broken(redb::Error),
}

macro_rules! broken_by {
    ($($error:ty),*) => {$(
        impl From<$error> for Fault {
            fn from(error: $error) -> Self {
                Self::Broken(error.into())
            }
        }
    )*};
}

broken_by!(redb::StorageError, redb::TableError, redb::TransactionError, redb::CommitError, redb::SetDurabilityError);

impl Fault {
    pub(crate) fn told(&self) -> StoreError {
        match self {
            Self::Refused(error) => error.clone(),
            Self::Row(reason) => StoreError::Unavailable { reason: format!("the index failed: {reason}") },
            Self::Broken(redb::Error::Io(error)) => StoreError::from_io("the index failed", error),
            Self::Broken(error) => StoreError::Unavailable { reason: format!("the index failed: {error}") },
        }
    }

    /// After a failure of the disk, or a panic, redb does nothing before it is opened again.
    fn wants_opening(&self) -> bool {
        use redb::Error::{Corrupted, DatabaseClosed, Io, LockPoisoned, PreviousIo};
        matches!(self, Self::Broken(Io(_) | PreviousIo | DatabaseClosed | LockPoisoned(_) | Corrupted(_)))
    }
}

/// Where the index lies.
#[derive(Clone, Debug)]
pub(crate) enum IndexPlace {
    File(PathBuf),
    Memory,
}

/// The open index and its sums.
pub(crate) struct Index {
    place: IndexPlace,
    /// None while it could not be opened again after a failure.
    database: RwLock<Option<Database>>,
    /// How often it was opened.
    opened: AtomicU64,
    /// For good: then it is not opened again.
    closed: AtomicBool,
    pub(crate) ledger: Ledger,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Index {
    /// Opens the index, or makes it where there is none; with `sync`, on disk.
    pub(crate) fn open(place: IndexPlace, sync: bool) -> Result<Self, StoreError> {
        if let IndexPlace::File(path) = &place {
            found(path, sync)?;
        }
        let database = connect(&place)?;
        let index = Self {
            place,
            database: RwLock::new(None),
            opened: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            ledger: Ledger::default(),
        };
        index.ledger.replace(sums(&database).map_err(|fault| index.damaged(&fault))?);
        *index.database.write().unwrap_or_else(PoisonError::into_inner) = Some(database);
        Ok(index)
    }

    fn damaged(&self, fault: &Fault) -> StoreError {
        match (&self.place, fault) {
            // A disk that is full or fails has damaged nothing.
            (_, Fault::Broken(redb::Error::Io(error))) if !is_damage(error) => fault.told(),
            (IndexPlace::File(path), Fault::Broken(error)) => damaged(path.clone(), &error.to_string()),
            (IndexPlace::File(path), Fault::Row(reason)) => damaged(path.clone(), reason),
            (_, fault) => fault.told(),
        }
    }

    /// Reads what is committed.
    pub(crate) fn read<T>(&self, read: impl Fn(&Tables<Reading>) -> Result<T, Fault>) -> Result<T, StoreError> {
        let opened = self.opened();
        match self.try_read(&read) {
            Err(fault) if fault.wants_opening() => {
                self.reopen(opened)?;
                self.try_read(&read).map_err(|fault| fault.told())
            }
            result => result.map_err(|fault| fault.told()),
        }
    }

    fn try_read<T>(&self, read: impl Fn(&Tables<Reading>) -> Result<T, Fault>) -> Result<T, Fault> {
        self.with(|database| {
            let transaction = database.begin_read()?;
            read(&Tables::reading(&transaction)?)
        })
    }

    /// A panic inside redb, on a file that is not what it was, is a failure of the index.
    fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, Fault>) -> Result<T, Fault> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or(Fault::Broken(redb::Error::DatabaseClosed))?;
        catch_unwind(AssertUnwindSafe(|| work(database))).unwrap_or_else(|_| Err(panicked()))
    }

    /// How often it was opened: more than before after each failure.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }

    /// Opens the index again unless somebody has since it was opened for the `opened`th time.
    fn reopen(&self, opened: u64) -> Result<(), StoreError> {
        let IndexPlace::File(path) = &self.place else { return Ok(()) };
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable { reason: "the store is closed".to_owned() });
        }
        if self.opened() != opened {
            return Ok(());
        }
        tracing::warn!(index = %path.display(), "the index failed and is opened again");
        *database = None;
        let again = connect(&self.place)?;
        // What was promised stays promised; what is there may not be what was thought to be.
        self.ledger.replace(sums(&again).map_err(|fault| self.damaged(&fault))?);
        *database = Some(again);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Lets go of the file, which then says that it was closed. What comes later is refused.
    pub(crate) fn close(&self) {
        if matches!(self.place, IndexPlace::File(_)) {
            self.closed.store(true, Ordering::SeqCst);
            *self.database.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// Makes an index where there is none. It comes to be as a whole: a process that dies meanwhile leaves none.
fn found(path: &Path, sync: bool) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::from_io("the index could not be made", &error);
    if path.try_exists().map_err(failed)? {
        return Ok(());
    }
    let new = path.with_extension("new");
    if new.try_exists().map_err(failed)? {
        fs::remove_file(&new).map_err(failed)?;
    }
    drop(Database::create(&new).map_err(|error| Fault::Broken(error.into()).told())?);
    fs::rename(&new, path).map_err(failed)?;
    if sync && let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
    }
    Ok(())
}

fn builder() -> redb::Builder {
    let mut builder = redb::Builder::new();
    builder.set_cache_size(CACHE);
    builder
}

/// Opens redb.
fn connect(place: &IndexPlace) -> Result<Database, StoreError> {
    let IndexPlace::File(path) = place else {
        let made = builder().create_with_backend(InMemoryBackend::new());
        return made.map_err(|error| Fault::Broken(error.into()).told());
    };
    let started = Instant::now();
    loop {
        let opened = catch_unwind(|| builder().open(path));
        match opened {
            Ok(Ok(database)) => return Ok(database),
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) if started.elapsed() < CLOSING => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => {
                let reason = "another process has it open".to_owned();
                return Err(StoreError::Index { path: path.clone(), reason });
            }
            Ok(Err(DatabaseError::Storage(redb::StorageError::Io(error)))) if !is_damage(&error) => {
                return Err(Fault::Broken(redb::Error::Io(error)).told());
            }
            Ok(Err(error)) => return Err(damaged(path.clone(), &error.to_string())),
            Err(_) => return Err(damaged(path.clone(), "reading it ended in a panic")),
        }
    }
}

/// Whether an error of the system speaks of the file's content and not of the disk.
fn is_damage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}

fn damaged(path: PathBuf, reason: &str) -> StoreError {
    let bytes = fs::metadata(&path).map_or(0, |file| file.len());
    let reason = format!(
        "its {bytes} bytes are damaged ({reason}); put a copy of it back from a backup, or, to begin anew without the \
         sessions in it, move the whole folder away"
    );
    StoreError::Index { path, reason }
}

/// The sums of the index. Nothing is written, which a full disk would not let through, but for the tables where they
/// are missing.
fn sums(database: &Database) -> Result<Sums, Fault> {
    let work = || {
        let transaction = database.begin_read()?;
        match Tables::reading(&transaction) {
            Err(Fault::Broken(redb::Error::TableDoesNotExist(_))) => {}
            tables => return read_sums(&tables?),
        }
        drop(transaction);
        let transaction = database.begin_write()?;
        let mut write = Write::new(Tables::writing(&transaction)?);
        write.order_droppable()?;
        let sums = read_sums(&write.tables)?;
        drop(write);
        transaction.commit()?;
        Ok(sums)
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()))
}

fn read_sums<A: tables::Access>(tables: &Tables<A>) -> Result<Sums, Fault> {
    let mut sums = Sums {
        live: tables.total("live")?,
        garbage: tables.total("garbage")?,
        sessions: tables.total("sessions")?,
        versions: tables.total("versions")?,
        ..Sums::default()
    };
    for entry in tables.owners.iter()? {
        let (owner, row) = entry?;
        sums.owners.insert(Owner(*owner.value()), row.value().0);
    }
    Ok(sums)
}

fn panicked() -> Fault {
    Fault::Broken(redb::Error::Corrupted("reading it ended in a panic".to_owned()))
}
