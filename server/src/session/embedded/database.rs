//! The open files of the index: the redb database and its journal.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

use redb::{Database, ReadableDatabase};

use super::error::IndexError;
use super::file::{Failed, connect, in_memory, panicked, totals};
use super::journal::Journal;
use super::place::{Lock, Place};
use super::recovery::{self, WholeObject};
use super::tables::{ReadOnly, Tables};
use crate::session::error::StoreError;
use crate::session::index::Capacity;

/// The open files.
pub(crate) struct OpenIndex {
    /// `None` for an index in memory.
    place: Option<Place>,
    /// `None` if it could not be reopened after a failure.
    database: RwLock<Option<Database>>,
    /// How many times it has been opened.
    opened: AtomicU64,
    /// Whether the index is closed for good and must not be reopened.
    closed: AtomicBool,
    /// The journal, the second copy of the index; `None` for an index in memory.
    journal: Mutex<Option<Journal>>,
    /// Why the last transaction failed, or why the next one will; `None` if neither.
    failure: Mutex<Option<StoreError>>,
    pub(crate) capacity: Capacity,
    /// Declared after `database`, so that it is released once the file is closed.
    lock: Mutex<Option<Lock>>,
}

impl fmt::Debug for OpenIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenIndex").field("place", &self.place).finish_non_exhaustive()
    }
}

impl OpenIndex {
    /// Opens the index at `place`, creating or repairing it if necessary. With `sync`, a new file is synced to disk.
    /// `is_whole` checks objects that only the journal names.
    pub(crate) fn open(place: Place, lock: Lock, sync: bool, is_whole: &WholeObject<'_>) -> Result<Self, StoreError> {
        let (database, journal) = recovery::open(&place, sync, is_whole)?;
        Self::new(Some(place), Some(lock), database, Some(journal))
    }

    /// Creates an empty index in memory.
    pub(crate) fn in_memory() -> Result<Self, StoreError> {
        let database = in_memory()?;
        recovery::create_tables(&database).map_err(|error| error.to_store_error())?;
        Self::new(None, None, database, None)
    }

    fn new(
        place: Option<Place>,
        lock: Option<Lock>,
        database: Database,
        journal: Option<Journal>,
    ) -> Result<Self, StoreError> {
        let index = Self {
            place,
            database: RwLock::new(None),
            opened: AtomicU64::new(1),
            closed: AtomicBool::new(false),
            journal: Mutex::new(journal),
            failure: Mutex::default(),
            capacity: Capacity::default(),
            lock: Mutex::new(lock),
        };
        index.capacity.replace(totals(&database).map_err(|error| index.damaged(error))?);
        *index.database.write().unwrap_or_else(PoisonError::into_inner) = Some(database);
        Ok(index)
    }

    fn damaged(&self, error: IndexError) -> StoreError {
        match &self.place {
            Some(place) => Failed::from(error).into_store_error(place),
            None => error.to_store_error(),
        }
    }

    // ---- The journal

    pub(super) fn journal(&self) -> MutexGuard<'_, Option<Journal>> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares the journal for the next transaction. After a failure, it may contain a transaction that the index
    /// lacks.
    pub(super) fn prepare_journal(&self, database: &Database) -> Result<(), IndexError> {
        let mut journal = self.journal();
        let (Some(open), Some(place)) = (&mut *journal, &self.place) else { return Ok(()) };
        if !open.is_uncertain() && !open.must_be_rewritten() {
            return Ok(());
        }
        let position = Tables::reading(&database.begin_read()?)?.journal_position()?;
        let rewound = !open.must_be_rewritten() && position.is_some_and(|at| open.rewind(at).is_ok_and(|done| done));
        if !rewound {
            tracing::warn!(journal = %open.path().display(), "the journal failed; rewriting it from the index");
            let path = open.path().to_owned();
            *open = recovery::rewrite(&*place.disk, &path, database, position)?;
        }
        Ok(())
    }

    /// Rewrites the journal if it has grown far beyond its base, because most of it is then about rows that have
    /// changed since.
    pub(super) fn compact_journal(&self, database: &Database) {
        let mut journal = self.journal();
        let (Some(open), Some(place)) = (journal.as_mut().filter(|open| open.is_large()), &self.place) else { return };
        match recovery::rewrite(&*place.disk, open.path(), database, Some(open.end())) {
            Ok(new) => *open = new,
            Err(error) => {
                tracing::warn!(?error, "the journal could not be rewritten; it keeps growing");
                open.postpone();
            }
        }
    }

    /// Refuses if the folder was removed, replaced or unmounted: anything written to it would be lost.
    pub(crate) fn check_place(&self) -> Result<(), StoreError> {
        let journal = self.journal();
        let Some(open) = &*journal else { return Ok(()) };
        let reason = match open.is_in_place() {
            Ok(true) => return Ok(()),
            Ok(false) => "it was removed, replaced or unmounted while the server ran".to_owned(),
            Err(error) => error.to_string(),
        };
        let folder = open.path().parent().unwrap_or(Path::new("")).display().to_string();
        drop(journal);
        let error = StoreError::Unavailable { reason: format!("the folder {folder} cannot be used: {reason}") };
        self.set_failure(Some(error.clone()));
        Err(error)
    }

    /// Returns whether a damaged index is kept beside this one. Then no object may be removed just because nothing
    /// names it.
    pub(crate) fn damaged_is_kept(&self) -> bool {
        self.place.as_ref().is_some_and(recovery::damaged_is_kept)
    }

    // ---- Failures

    /// Returns why the last transaction failed; `None` if it succeeded.
    pub(crate) fn failure(&self) -> Option<StoreError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_failure(&self, failure: Option<StoreError>) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }

    /// Reads committed data.
    pub(crate) fn read<T>(&self, read: impl Fn(&Tables<ReadOnly>) -> Result<T, IndexError>) -> Result<T, StoreError> {
        let opened = self.opened();
        match self.try_read(&read) {
            Err(error) if error.needs_reopen() => {
                self.reopen(opened).inspect_err(|error| self.set_failure(Some(error.clone())))?;
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

    /// Runs `work`. A panic inside redb, which a modified file can cause, counts as a failure of the index.
    pub(super) fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, IndexError>) -> Result<T, IndexError> {
        let database = self.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or(IndexError::Broken(redb::Error::DatabaseClosed))?;
        catch_unwind(AssertUnwindSafe(|| work(database))).unwrap_or_else(|_| Err(panicked()))
    }

    /// Returns how many times the index has been opened. Reopening after a failure increments it.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::SeqCst)
    }

    /// Reopens the index, unless another thread has done so since [`Self::opened`] returned `opened`.
    pub(super) fn reopen(&self, opened: u64) -> Result<(), StoreError> {
        let Some(place) = &self.place else { return Ok(()) };
        let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable { reason: "the store is closed".to_owned() });
        }
        if self.opened() != opened {
            return Ok(());
        }
        tracing::warn!(index = %place.path.display(), "the index failed; reopening it");
        *database = None;
        let reopened = connect(place).map_err(|failed| failed.into_store_error(place))?;
        if let Some(journal) = &mut *self.journal() {
            journal.committed = None;
        }
        // Reservations stay valid, but the totals may differ from those in memory.
        self.capacity.replace(totals(&reopened).map_err(|error| self.damaged(error))?);
        *database = Some(reopened);
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Closes the files. Later requests are refused.
    pub(crate) fn close(&self) {
        if self.place.is_some() {
            self.closed.store(true, Ordering::SeqCst);
            *self.database.write().unwrap_or_else(PoisonError::into_inner) = None;
            *self.journal() = None;
            *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}
