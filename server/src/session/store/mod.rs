//! The store of sessions: one service over the index, the objects and the memory.
//!
//! A commit writes the object first and then, in one transaction of the index, all that points to it. So whatever the
//! index names is there, and what it does not name can be swept up.

mod admission;
mod ballast;
mod forks;
mod load;
mod responses;
mod sessions;
mod sweep;
mod turns;
mod types;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use object_store::ObjectStore;
use tokio::sync::Notify;

use super::blobs::{Blobs, make_folder};
use super::cache::Cache;
use super::index::{Bounds, Fault, Index, IndexPlace, Reading, SessionRow, Tables, VersionRow, Writer};
use super::lease::Leases;
use super::{SessionId, StoreError, VersionId};

use ballast::Ballast;
pub use turns::Turn;
pub use types::{
    Durability, Fork, Metadata, NewSession, Patch, Place, Receipt, ReceiptKey, Session, SnapshotCodec, Start,
    StoreOptions, StoreStats, Tier, TurnNote, Version,
};

/// The file of the index in the store's folder.
const INDEX: &str = "index.redb";

/// Sessions, and all that is kept of them. Clones are the same store.
#[derive(Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

struct Inner {
    options: StoreOptions,
    codec: Arc<dyn SnapshotCodec>,
    index: Arc<Index>,
    writer: Writer,
    blobs: Blobs,
    cache: Arc<Cache>,
    leases: Leases,
    uses: Uses,
    /// Wakes the sweep when there is garbage.
    garbage: Arc<Notify>,
    /// Whether any object may be there that nothing points to and that is not garbage: they are all to be looked at.
    orphans: AtomicBool,
    /// Those that may be, by name: their writing failed, or their way into the index.
    suspects: Mutex<HashSet<VersionId>>,
    ballast: Ballast,
    /// One at a time makes room.
    making_room: tokio::sync::Mutex<()>,
    counters: Counters,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The sweep finds that there is no store any more.
        self.garbage.notify_one();
    }
}

#[derive(Debug, Default)]
struct Counters {
    hits_memory: AtomicU64,
    hits_disk: AtomicU64,
    commits: AtomicU64,
    forks: AtomicU64,
    collected: AtomicU64,
    dropped: AtomicU64,
    refused: AtomicU64,
}

fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Last uses that the index does not have yet, in unix milliseconds: to look at a session writes nothing.
#[derive(Clone, Debug, Default)]
struct Uses(Arc<Mutex<HashMap<SessionId, u64>>>);

impl Uses {
    fn note(&self, id: &SessionId) {
        self.lock().insert(id.clone(), now());
    }

    fn of(&self, id: &SessionId) -> u64 {
        self.lock().get(id).copied().unwrap_or(0)
    }

    fn forget(&self, id: &SessionId) {
        self.lock().remove(id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unix milliseconds.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// An id that the index holds, which only ever came from here.
fn version_id(text: &str) -> Result<VersionId, StoreError> {
    VersionId::parse(text).ok_or_else(|| strange(text))
}

fn session_id(text: &str) -> Result<SessionId, StoreError> {
    SessionId::parse(text).ok_or_else(|| strange(text))
}

fn strange(text: &str) -> StoreError {
    StoreError::Unavailable { reason: format!("the index names {text:?}, which is no id") }
}

impl Store {
    /// Opens the store, or makes it where there is none. No object is read, however many there are.
    ///
    /// # Errors
    /// An option is out of bounds, the folder cannot be used, or its index is damaged or in use.
    pub async fn open(options: StoreOptions, codec: Arc<dyn SnapshotCodec>) -> Result<Self, StoreError> {
        let (place, sync) = (options.place.clone(), options.durability == Durability::Turn);
        let blobs = blocking(move || match place {
            Place::Folder(folder) => Blobs::folder(&folder, sync),
            Place::Memory => Ok(Blobs::memory()),
        });
        Self::over(blobs.await?, options, codec).await
    }

    /// As [`Self::open`], with the objects in a store of the caller's choice; only the index is at the place that the
    /// options name.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_with(
        objects: Arc<dyn ObjectStore>,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Result<Self, StoreError> {
        let sync = options.durability == Durability::Turn;
        if let Place::Folder(folder) = options.place.clone() {
            let made = blocking(move || {
                make_folder(&folder, sync).map_err(|error| StoreError::from_io("the store's folder", &error))
            });
            made.await?;
        }
        Self::over(Blobs::over(objects), options, codec).await
    }

    async fn over(blobs: Blobs, options: StoreOptions, codec: Arc<dyn SnapshotCodec>) -> Result<Self, StoreError> {
        if options.keep_versions == 0 {
            return Err(StoreError::Option { name: "keep_versions", found: 0, bound: 1 });
        }
        let place = match &options.place {
            Place::Folder(folder) => IndexPlace::File(folder.join(INDEX)),
            Place::Memory => IndexPlace::Memory,
        };
        if let IndexPlace::File(path) = &place
            && !path.exists()
            && blobs.any().await
        {
            // An index made now would name none of them, and all would be swept up.
            let reason = "it is not there, but snapshots are: put a copy of it back from a backup, or, to begin anew \
                          without the sessions in it, move the whole folder away";
            return Err(StoreError::Index { path: path.clone(), reason: reason.to_owned() });
        }
        let sync = options.durability == Durability::Turn;
        let file = match &options.place {
            Place::Folder(folder) => Some(folder.join(ballast::FILE)),
            Place::Memory => None,
        };
        let (index, ballast) = blocking(move || {
            let ballast = Ballast::new(file);
            let index = match Index::open(place.clone(), sync) {
                // An index that was not closed writes when it is opened.
                Err(StoreError::Full { .. }) if ballast.release() => Index::open(place, sync)?,
                index => index?,
            };
            Ok((Arc::new(index), ballast))
        })
        .await?;
        let (cache, garbage) = (Arc::new(Cache::new(options.ram_bytes)), Arc::new(Notify::new()));
        let freed = {
            let (cache, garbage) = (Arc::clone(&cache), Arc::clone(&garbage));
            move |freed: &[VersionId]| {
                for id in freed {
                    cache.remove(id);
                }
                garbage.notify_one();
            }
        };
        let settle = {
            let blobs = blobs.clone();
            move || blobs.settle()
        };
        let writer = Writer::start(Arc::clone(&index), sync, freed, settle)?;
        let inner = Arc::new(Inner {
            options,
            codec,
            index,
            writer,
            blobs,
            cache,
            leases: Leases::default(),
            uses: Uses::default(),
            garbage,
            orphans: AtomicBool::new(false),
            suspects: Mutex::default(),
            ballast,
            making_room: tokio::sync::Mutex::default(),
            counters: Counters::default(),
        });
        sweep::start(&inner);
        Ok(Self { inner })
    }

    /// The store in numbers.
    pub fn stats(&self) -> StoreStats {
        let Inner { index, cache, counters, writer, .. } = &*self.inner;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (ram_snapshots, ram_bytes) = cache.size();
        index.ledger.sums(|sums| StoreStats {
            sessions: sums.sessions,
            versions: sums.versions,
            disk_bytes: sums.live,
            garbage_bytes: sums.garbage,
            ram_snapshots,
            ram_bytes,
            hits_memory: read(&counters.hits_memory),
            hits_disk: read(&counters.hits_disk),
            commits: read(&counters.commits),
            forks: read(&counters.forks),
            collected: read(&counters.collected),
            dropped: read(&counters.dropped),
            refused: read(&counters.refused),
            transactions: writer.transactions(),
        })
    }

    /// Writes to disk what is not there yet.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let noted = self.inner.note_uses().await;
        // What is dearer than the last uses is put on disk even where they cannot be.
        self.inner.flush().await.and(noted)
    }

    /// Writes to disk what is not there yet, and lets go of the index: the next start finds all in order, and what is
    /// asked of the store from now on is refused. A store in memory ends as it is.
    ///
    /// # Errors
    /// The disk is full or fails; the store is closed all the same.
    pub async fn close(&self) -> Result<(), StoreError> {
        let flushed = self.flush().await;
        if self.inner.options.place == Place::Memory {
            return flushed;
        }
        let inner = Arc::clone(&self.inner);
        let closed = blocking(move || {
            inner.writer.end();
            inner.index.close();
            Ok(())
        });
        closed.await.and(flushed)
    }
}

impl Inner {
    fn bounds(&self) -> Bounds {
        Bounds { disk: self.options.disk_bytes, owner: self.options.owner_bytes }
    }

    /// Reads the index, away from the threads that must not wait for a disk.
    async fn read<T: Send + 'static>(
        &self,
        read: impl Fn(&Tables<Reading>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, StoreError> {
        let index = Arc::clone(&self.index);
        blocking(move || index.read(read)).await
    }

    /// Whether a session's time is over. One in use never is.
    fn over(&self, id: &SessionId, row: &SessionRow) -> bool {
        row.ends(self.uses.of(id)).is_some_and(|ends| ends <= now()) && !self.leases.held(id)
    }

    fn session(&self, id: SessionId, row: SessionRow, head: VersionRow) -> Result<Session, StoreError> {
        let (used, in_use) = (self.uses.of(&id), self.leases.held(&id));
        told(id, row, head, used, in_use)
    }
}

/// A session that nobody has used yet.
fn new_session(id: &SessionId, row: &SessionRow, head: &VersionRow) -> Result<Session, StoreError> {
    told(id.clone(), row.clone(), head.clone(), 0, false)
}

/// A session by its rows, its last use and whether it is in use.
fn told(id: SessionId, row: SessionRow, head: VersionRow, used: u64, in_use: bool) -> Result<Session, StoreError> {
    let forked_from = match row.forked_from.as_ref() {
        Some((session, version)) => Some((session_id(session)?, version_id(version)?)),
        None => None,
    };
    Ok(Session {
        head: version(&row.head, head, true)?,
        created: row.created,
        updated: row.updated,
        expires: row.ends(used).map(|ends| ends / 1000),
        ttl: row.ttl,
        in_use,
        metadata: row.metadata,
        forked_from,
        id,
    })
}

fn version(id: &str, row: VersionRow, kept: bool) -> Result<Version, StoreError> {
    Ok(Version {
        id: version_id(id)?,
        parent: row.parent.as_deref().map(version_id).transpose()?,
        tokens: row.tokens,
        time: row.time,
        label: row.label,
        kind: row.kind,
        prompt_tokens: row.prompt_tokens,
        completion_tokens: row.completion_tokens,
        bytes: row.bytes,
        kept,
    })
}

/// Runs what may wait for a disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let end = tokio::task::spawn_blocking(work).await;
    end.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}

/// Does work to its end, even when whoever waits for it goes.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    let end = tokio::spawn(work).await;
    end.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}

fn seconds(ttl: Duration) -> u64 {
    ttl.as_secs()
}
