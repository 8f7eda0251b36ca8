//! The index: which sessions there are and which versions they point to, in one file of redb. It holds no snapshot.

use std::fmt;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use redb::backends::InMemoryBackend;
use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable as _};

use super::capacity::{Capacity, Totals};
use super::error::IndexError;
use super::tables::{Access, ReadOnly, Tables};
use super::transaction::Write;
use crate::session::error::StoreError;
use crate::session::id::Owner;

/// How long to wait for a previous store in this process that is still closing the index.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Bytes that redb caches in memory, in addition to the store's budget.
const CACHE: usize = 64 << 20;

/// Why a panic inside redb counts as damage.
const PANICKED: &str = "reading it caused a panic";

/// The open index.
pub(crate) struct Index {
    /// `None`: in memory.
    path: Option<PathBuf>,
    /// `None` if it could not be reopened after a failure.
    database: RwLock<Option<Database>>,
    /// How many times it has been opened.
    opened: AtomicU64,
    /// Closed for good, and not to be reopened.
    closed: AtomicBool,
    pub(crate) capacity: Capacity,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Index {
    /// Opens the index at `path`, creating it if necessary, or a new one in memory. With `sync`, a new file is synced to disk.
    pub(crate) fn open(path: Option<PathBuf>, sync: bool) -> Result<Self, StoreError> {
        if let Some(path) = &path {
            create_file(path, sync)?;
        }
        let database = connect(path.as_deref())?;
        let index = Self {
            path,
            database: RwLock::new(None),
            opened: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            capacity: Capacity::default(),
        };
        index.capacity.replace(totals(&database).map_err(|error| index.damaged(&error))?);
        *index.database.write().unwrap_or_else(PoisonError::into_inner) = Some(database);
        Ok(index)
    }

    fn damaged(&self, error: &IndexError) -> StoreError {
        match (&self.path, error) {
            // A full or failing disk has damaged nothing.
            (_, IndexError::Broken(redb::Error::Io(io))) if !is_damage(io) => error.to_store_error(),
            (Some(path), IndexError::Broken(error)) => damaged(path, &error.to_string()),
            (Some(path), IndexError::Row(reason)) => damaged(path, reason),
            _ => error.to_store_error(),
        }
    }

    /// Reads what is committed.
    pub(crate) fn read<T>(&self, read: impl Fn(&Tables<ReadOnly>) -> Result<T, IndexError>) -> Result<T, StoreError> {
        let opened = self.opened();
        match self.try_read(&read) {
            Err(error) if error.needs_reopen() => {
                self.reopen(opened)?;
                self.try_read(&read).map_err(|error| error.to_store_error())
            }
            result => result.map_err(|error| error.to_store_error()),
        }
    }

    fn try_read<T>(&self, read: impl Fn(&Tables<ReadOnly>) -> Result<T, IndexError>) -> Result<T, IndexError> {
        self.with(|database| {
            let transaction = database.begin_read()?;
            read(&Tables::reading(&transaction)?)
        })
    }

    /// Runs `work`. A panic inside redb, which a changed file can cause, counts as a failure of the index.
    pub(super) fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, IndexError>) -> Result<T, IndexError> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or(IndexError::Broken(redb::Error::DatabaseClosed))?;
        catch_unwind(AssertUnwindSafe(|| work(database))).unwrap_or_else(|_| Err(panicked()))
    }

    /// How many times the index has been opened. It grows after each failure.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }

    /// Reopens the index, unless another thread has done so since the count of openings was `opened`.
    pub(super) fn reopen(&self, opened: u64) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable { reason: "the store is closed".to_owned() });
        }
        if self.opened() != opened {
            return Ok(());
        }
        tracing::warn!(index = %path.display(), "the index failed; reopening it");
        *database = None;
        let reopened = connect(Some(path))?;
        // Reservations stay valid, but the totals may differ from those in memory.
        self.capacity.replace(totals(&reopened).map_err(|error| self.damaged(&error))?);
        *database = Some(reopened);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Closes the file properly. Later requests are refused.
    pub(crate) fn close(&self) {
        if self.path.is_some() {
            self.closed.store(true, Ordering::SeqCst);
            *self.database.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// Creates the file if it does not exist, atomically: a process that dies meanwhile leaves none.
fn create_file(path: &Path, sync: bool) -> Result<(), StoreError> {
    let failed = |error: std::io::Error| StoreError::from_io("creating the index failed", &error);
    if path.try_exists().map_err(failed)? {
        return Ok(());
    }
    let new = path.with_extension("new");
    if new.try_exists().map_err(failed)? {
        fs::remove_file(&new).map_err(failed)?;
    }
    drop(Database::create(&new).map_err(|error| IndexError::Broken(error.into()).to_store_error())?);
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

fn connect(path: Option<&Path>) -> Result<Database, StoreError> {
    let Some(path) = path else {
        let created = builder().create_with_backend(InMemoryBackend::new());
        return created.map_err(|error| IndexError::Broken(error.into()).to_store_error());
    };
    let started = Instant::now();
    loop {
        match catch_unwind(|| builder().open(path)) {
            Ok(Ok(database)) => return Ok(database),
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) if started.elapsed() < CLOSE_TIMEOUT => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(Err(DatabaseError::DatabaseAlreadyOpen)) => {
                let reason = "another process has it open".to_owned();
                return Err(StoreError::Index { path: path.to_owned(), reason });
            }
            Ok(Err(DatabaseError::Storage(redb::StorageError::Io(error)))) if !is_damage(&error) => {
                return Err(IndexError::Broken(redb::Error::Io(error)).to_store_error());
            }
            Ok(Err(error)) => return Err(damaged(path, &error.to_string())),
            Err(_) => return Err(damaged(path, PANICKED)),
        }
    }
}

/// Whether an I/O error is about the content of the file rather than the disk.
fn is_damage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}

fn damaged(path: &Path, reason: &str) -> StoreError {
    let bytes = fs::metadata(path).map_or(0, |file| file.len());
    let reason = format!(
        "its {bytes} bytes are damaged ({reason}); restore it from a backup or, to start without its sessions, move the \
         whole folder away"
    );
    StoreError::Index { path: path.to_owned(), reason }
}

/// Reads the totals. Missing tables are created; otherwise nothing is written, because the disk may be full.
fn totals(database: &Database) -> Result<Totals, IndexError> {
    let work = || {
        let transaction = database.begin_read()?;
        match Tables::reading(&transaction) {
            Err(IndexError::Broken(redb::Error::TableDoesNotExist(_))) => {}
            tables => return read_totals(&tables?),
        }
        drop(transaction);
        let transaction = database.begin_write()?;
        let mut write = Write::new(Tables::writing(&transaction)?);
        write.rebuild_droppable()?;
        let totals = read_totals(&write.tables)?;
        drop(write);
        transaction.commit()?;
        Ok(totals)
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(panicked()))
}

fn read_totals<A: Access>(tables: &Tables<A>) -> Result<Totals, IndexError> {
    let mut totals = Totals {
        live: tables.total("live")?,
        garbage: tables.total("garbage")?,
        sessions: tables.total("sessions")?,
        versions: tables.total("versions")?,
        ..Totals::default()
    };
    for entry in tables.owners.iter()? {
        let (owner, row) = entry?;
        totals.owners.insert(Owner(*owner.value()), row.value().0);
    }
    Ok(totals)
}

fn panicked() -> IndexError {
    IndexError::Broken(redb::Error::Corrupted(PANICKED.to_owned()))
}
