//! Opens and closes a store, and reports its statistics.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use object_store::ObjectStore;
use tokio::sync::Notify;

use super::inner::{Counters, Inner, LastUses, Store};
use super::types::{Durability, Location, SnapshotCodec, StoreOptions, StoreStats};
use super::{probe, shared_sweep, sweep};
use crate::session::backend::Latency;
use crate::session::blocking::blocking;
use crate::session::cache::Cache;
use crate::session::disk::{Disk, SystemDisk, make_folder};
use crate::session::embedded::{EmbeddedIndex, INDEX, JOURNAL};
use crate::session::error::StoreError;
use crate::session::id::VersionId;
use crate::session::index::Index;
#[cfg(feature = "postgres")]
use crate::session::index::Limits;
use crate::session::lease::Leases;
use crate::session::measured::Measured;
use crate::session::objects::Objects;
#[cfg(feature = "postgres")]
use crate::session::postgres::{PostgresIndex, PostgresOptions, PostgresUrl, patiently};

/// The cache, and the notification that wakes the sweep when there is garbage.
type Parts = (Arc<Cache>, Arc<Notify>);

/// Returns these parts, and the callback that the index calls with versions whose snapshots nothing points to any more.
fn parts(options: &StoreOptions) -> (Parts, impl Fn(&[VersionId]) + Send + Sync + 'static) {
    let (cache, garbage) = (Arc::new(Cache::new(options.ram_bytes)), Arc::new(Notify::new()));
    let parts = (Arc::clone(&cache), Arc::clone(&garbage));
    let freed = move |freed: &[VersionId]| {
        for id in freed {
            cache.remove(id);
        }
        garbage.notify_one();
    };
    (parts, freed)
}

fn check(options: &StoreOptions) -> Result<(), StoreError> {
    match options.keep_versions {
        0 => Err(StoreError::Option { name: "keep_versions", found: 0, bound: 1 }),
        _ => Ok(()),
    }
}

/// Marks a database index as in use. Refuses if the index is new but the object store already has snapshots.
#[cfg(feature = "postgres")]
async fn begin(index: &PostgresIndex, objects: &Objects) -> Result<(), StoreError> {
    if index.has_begun().await? {
        return Ok(());
    }
    if objects.next(&mut objects.batches(1)).await?.is_some() {
        // The index would name none of them, so the sweep would remove them all.
        let reason = "it is new, but there are snapshots: name the database that has their sessions, restore it from a \
                      backup or, to start without its sessions, move the snapshots away";
        return Err(StoreError::Database { reason: reason.to_owned() });
    }
    index.begin().await
}

impl Store {
    /// Opens the store, creating it if necessary. Reads no objects.
    ///
    /// # Errors
    /// An option is out of range, the folder cannot be used, or its index is damaged or in use.
    pub async fn open(options: StoreOptions, codec: Arc<dyn SnapshotCodec>) -> Result<Self, StoreError> {
        let (location, sync) = (options.location.clone(), options.durability == Durability::Turn);
        let objects = blocking(move || match location {
            Location::Folder(folder) => Objects::folder(&folder, sync),
            Location::Memory => Ok(Objects::memory()),
        });
        Self::start(Arc::new(SystemDisk), objects.await?, options, codec).await
    }

    /// Like [`Self::open`], but keeps the objects in `objects`. `options` say where the index is.
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub async fn open_with(
        objects: Arc<dyn ObjectStore>,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Result<Self, StoreError> {
        let sync = options.durability == Durability::Turn;
        if let Location::Folder(folder) = options.location.clone() {
            let created = blocking(move || {
                make_folder(&folder, sync)
                    .map_err(|error| StoreError::from_io("creating the store's folder failed", &error))
            });
            created.await?;
        }
        Self::start(Arc::new(SystemDisk), Objects::new(objects), options, codec).await
    }

    /// Like [`Self::open`], but uses `disk`. The object store `objects` must write to the same disk, in the folder
    /// `objects`; each object is synced if the options say [`Durability::Turn`].
    ///
    /// # Errors
    /// Same as [`Self::open`].
    pub async fn open_on(
        disk: Arc<dyn Disk>,
        objects: Arc<dyn ObjectStore>,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Result<Self, StoreError> {
        let objects = match &options.location {
            Location::Folder(folder) => {
                Objects::on(Arc::clone(&disk), objects, folder, options.durability == Durability::Turn)
            }
            Location::Memory => Objects::new(objects),
        };
        Self::start(disk, objects, options, codec).await
    }

    /// Opens the store of a model on a database and an object store that other servers use at the same time. `model` is
    /// the model's name in letters and digits; it becomes the name of its database schema.
    ///
    /// # Errors
    /// An option is out of range, the database cannot be used, or the database does not belong to these objects.
    #[cfg(feature = "postgres")]
    pub async fn open_shared(
        objects: Arc<dyn ObjectStore>,
        (url, model): (PostgresUrl, &str),
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Result<Self, StoreError> {
        check(&options)?;
        let objects = Objects::remote(objects);
        let limits = Limits { disk: options.disk_bytes, owner: options.owner_bytes };
        let (parts, freed) = parts(&options);
        let index = PostgresIndex::open(PostgresOptions::new(url, model, limits), Box::new(freed)).await?;
        patiently(|| begin(&index, &objects)).await?;
        Ok(Self::assemble(Arc::new(index), objects, options, codec, parts))
    }

    async fn start(
        disk: Arc<dyn Disk>,
        objects: Objects,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Result<Self, StoreError> {
        check(&options)?;
        if let Location::Folder(folder) = &options.location
            && !exists(&*disk, &folder.join(INDEX))?
            && !exists(&*disk, &folder.join(JOURNAL))?
            && objects.any().await?
        {
            // A new index would name none of them, so the sweep would remove them all.
            let reason = "it is missing, but there are snapshots: restore it from a backup or, to start without its \
                          sessions, move the whole folder away";
            return Err(StoreError::Index { path: folder.join(INDEX), reason: reason.to_owned() });
        }
        let sync = options.durability == Durability::Turn;
        let (parts, freed) = parts(&options);
        let (location, written, codec_of_object) = (options.location.clone(), objects.clone(), Arc::clone(&codec));
        let index = blocking(move || {
            let is_whole =
                |id: &str, bytes: u64| written.is_whole(id, bytes, |bytes| codec_of_object.decode(bytes).is_ok());
            let folder = match &location {
                Location::Folder(folder) => Some(&**folder),
                Location::Memory => None,
            };
            let objects = written.clone();
            EmbeddedIndex::open(disk, folder, sync, &is_whole, Box::new(freed), Box::new(move || objects.sync()))
        });
        let index: Arc<dyn Index> = Arc::new(index.await?);
        Ok(Self::assemble(index, objects, options, codec, parts))
    }

    /// Creates a store over an index and an object store that are already open and that other stores may use at the
    /// same time.
    #[cfg(test)]
    pub(crate) fn over(
        index: Arc<dyn Index>,
        objects: Arc<dyn ObjectStore>,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
    ) -> Self {
        let (parts, _) = parts(&options);
        let objects = if index.is_shared() { Objects::remote(objects) } else { Objects::new(objects) };
        Self::assemble(index, objects, options, codec, parts)
    }

    fn assemble(
        index: Arc<dyn Index>,
        objects: Objects,
        options: StoreOptions,
        codec: Arc<dyn SnapshotCodec>,
        (cache, garbage): Parts,
    ) -> Self {
        let above = index.capacity().totals(|totals| totals.above(options.owner_bytes));
        if above > 0 {
            tracing::warn!(
                owners = above,
                limit = options.owner_bytes,
                "owners store more than their budget: they lose old versions"
            );
        }
        let index = Measured::new(index);
        let inner = Arc::new(Inner {
            options,
            codec,
            index_times: Arc::clone(index.times()),
            index: Arc::new(index),
            objects,
            cache,
            leases: Leases::default(),
            last_uses: LastUses::default(),
            garbage,
            orphans: AtomicBool::new(false),
            suspects: Mutex::default(),
            removing: tokio::sync::RwLock::default(),
            evicting: tokio::sync::Mutex::default(),
            releasing: Arc::default(),
            counters: Counters::default(),
        });
        if inner.index.is_shared() {
            shared_sweep::start(&inner);
            probe::start(&inner);
        } else {
            sweep::start(&inner);
        }
        Self { inner }
    }

    /// Returns the store's statistics.
    pub fn stats(&self) -> StoreStats {
        let Inner { index, cache, counters, options, .. } = &*self.inner;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (ram_snapshots, ram_bytes) = cache.size();
        index.capacity().totals(|totals| StoreStats {
            sessions: totals.sessions,
            versions: totals.versions,
            disk_bytes: totals.live,
            disk_budget: options.disk_bytes,
            garbage_bytes: totals.garbage,
            text_bytes: totals.texts,
            ram_snapshots,
            ram_bytes,
            hits_memory: read(&counters.hits_memory),
            hits_disk: read(&counters.hits_disk),
            commits: read(&counters.commits),
            conflicts: read(&counters.conflicts),
            forks: read(&counters.forks),
            collected: read(&counters.collected),
            dropped: read(&counters.dropped),
            refused: read(&counters.refused),
            transactions: index.transactions(),
        })
    }

    /// Returns the latencies of the index and of the object store, by kind of operation.
    pub fn latencies(&self) -> [Vec<Latency>; 2] {
        [&self.inner.index_times, self.inner.objects.backend()].map(|backend| backend.latencies())
    }

    /// Returns why the store cannot commit: the last transaction failed, the folder is gone, or the object store is
    /// unreachable. A later success clears the failure.
    pub fn failure(&self) -> Option<StoreError> {
        self.inner.index.failure().or_else(|| self.inner.objects.backend().check().err())
    }

    /// Writes everything to disk that is so far only in memory.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub async fn flush(&self) -> Result<(), StoreError> {
        let saved = self.inner.save_last_uses().await;
        // Sessions matter more than last uses, so they are flushed even if those cannot be saved.
        self.inner.flush().await.and(saved)
    }

    /// Flushes the store and closes the index, so that the next start needs no repair. Later requests are refused. Does
    /// nothing for a store in memory.
    ///
    /// # Errors
    /// The disk is full or fails; the store is closed anyway.
    pub async fn close(&self) -> Result<(), StoreError> {
        let saved = self.inner.save_last_uses().await;
        // Removals may have to wait for a slow object store, and the process may be killed before they end. Closing the
        // index reports a failure.
        let _ = self.inner.flush().await;
        let _none_removes = self.inner.removing.write().await;
        let _none_releases = self.inner.releasing.write().await;
        // Sessions matter more than last uses, so the index is closed even if those cannot be saved.
        self.inner.index.close().await.and(saved)
    }
}

fn exists(disk: &dyn Disk, path: &Path) -> Result<bool, StoreError> {
    disk.exists(path).map_err(|error| StoreError::from_io("opening the index failed", &error))
}
