//! The stored bytes of snapshots: one object per version, named after it, written completely or not at all.

use std::collections::{BTreeSet, HashSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _};
use tokio::time::{Instant, sleep, timeout};

use super::backend::{Backend, PUT, no_answer, pauses};
use super::disk::{self, Disk, OpenMode, SystemDisk, make_folder};
use super::error::StoreError;
use super::id::VersionId;

/// The folder of the objects, inside the store's folder.
const OBJECTS: &str = "objects";

/// The object that is read and written to find out whether a remote store works.
const PROBE: &str = "probe";

const OPERATIONS: [&str; 4] = [PUT, "get", "delete", "list"];

/// Time limit of one attempt at a remote store, without the time to transfer the bytes.
const ATTEMPT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 4 });

/// Time after which no further attempt begins.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 6_000 });

/// The minimum transfer rate that is waited for, in bytes per millisecond: one mebibyte per second.
const SLOWEST: u64 = 1 << 10;

/// The maximum transfer time: much less than the age at which an object that no index names is removed.
const TRANSFER: Duration = Duration::from_mins(10);

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Time limit for one batch of a listing.
const LISTING: Duration = Duration::from_secs(30);

/// Objects, each with the time when it was written, in unix milliseconds.
pub(crate) type Batch = Vec<(VersionId, u64)>;
pub(crate) type Batches = BoxStream<'static, Result<Batch, StoreError>>;

/// The object store.
#[derive(Clone, Debug)]
pub(crate) struct Objects {
    store: Arc<dyn ObjectStore>,
    backend: Arc<Backend>,
    /// For objects in files: their disk and folder, where a crashed process may have left partly written files.
    folder: Option<(Arc<dyn Disk>, PathBuf)>,
    /// Objects being written, or not yet in the index.
    uploads: Arc<Mutex<HashSet<VersionId>>>,
    /// Objects written but not yet synced to disk; `None` if every write syncs, or if nothing is on a disk.
    unsynced: Option<Arc<Mutex<HashSet<VersionId>>>>,
}

/// Marks an object as being written or not yet in the index. Until this is dropped, the object is not an orphan.
#[derive(Debug)]
pub(crate) struct Upload {
    objects: Objects,
    id: VersionId,
}

impl Objects {
    pub(crate) fn memory() -> Self {
        Self::new(Arc::new(InMemory::new()))
    }

    pub(crate) fn new(store: Arc<dyn ObjectStore>) -> Self {
        let backend = Backend::new("the object store", &OPERATIONS, false);
        Self { store, backend, folder: None, uploads: Arc::default(), unsynced: None }
    }

    /// Uses a store that other servers use as well. Failed operations are retried for some seconds.
    #[cfg(any(test, feature = "postgres"))]
    pub(crate) fn remote(store: Arc<dyn ObjectStore>) -> Self {
        Self { backend: Backend::new("the object store", &OPERATIONS, true), ..Self::new(store) }
    }

    /// Returns the health and latencies of the object store.
    pub(crate) fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }

    /// Runs an operation on an object of `bytes` bytes.
    async fn run<T, A: Future<Output = Result<T, StoreError>>>(
        &self,
        operation: &'static str,
        bytes: u64,
        attempt: impl Fn() -> A,
    ) -> Result<T, StoreError> {
        let tried = async {
            if !self.backend.is_remote() {
                return attempt().await;
            }
            let (began, limit) = (Instant::now(), ATTEMPT + Duration::from_millis(bytes / SLOWEST).min(TRANSFER));
            let mut pauses = pauses(FIRST_PAUSE, LONGEST_PAUSE);
            loop {
                let result = timeout(limit, attempt()).await.unwrap_or_else(|_| Err(no_answer(limit)));
                let pause = pauses.next().unwrap_or(LONGEST_PAUSE);
                if !matches!(result, Err(StoreError::Unavailable { .. })) || began.elapsed() + pause >= PATIENCE {
                    return result;
                }
                sleep(pause).await;
            }
        };
        self.backend.run(operation, None, tried).await
    }

    /// Checks whether a remote store works: tries a read and, if that fails or a write failed before, a write.
    pub(crate) async fn probe(&self) -> Result<(), StoreError> {
        let path = Path::from(PROBE);
        let failed = |error| failed("it cannot be used", &error);
        let read = async {
            match self.store.head(&path).await {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                Err(error) => Err(failed(error)),
            }
        };
        if self.backend.check().is_ok() && self.backend.run("get", Some(ATTEMPT), read).await.is_ok() {
            return Ok(());
        }
        let write = async { self.store.put(&path, PROBE.into()).await.map(drop).map_err(failed) };
        self.backend.run(PUT, Some(ATTEMPT), write).await
    }

    /// Stores objects as files in `folder`. With `sync`, each write returns once it is on disk.
    pub(crate) fn folder(folder: &FilePath, sync: bool) -> Result<Self, StoreError> {
        let store = files(folder, sync)?;
        make_private(folder).map_err(|error| unusable(folder, &error))?;
        Ok(Self::on(Arc::new(SystemDisk), Arc::new(store), folder, sync))
    }

    /// Uses the objects of `store`, which are files in `folder` on this disk. With `sync`, each write syncs its object.
    pub(crate) fn on(disk: Arc<dyn Disk>, store: Arc<dyn ObjectStore>, folder: &FilePath, sync: bool) -> Self {
        let unsynced = (!sync).then(Arc::default);
        Self { folder: Some((disk, folder.join(OBJECTS))), unsynced, ..Self::new(store) }
    }

    /// Writes an object, and syncs it if the store does so.
    pub(crate) async fn put(&self, id: &VersionId, bytes: Bytes) -> Result<Upload, StoreError> {
        self.lock().insert(id.clone());
        let upload = Upload { objects: self.clone(), id: id.clone() };
        let (path, length) = (path(id), bytes.len() as u64);
        let written = self.run(PUT, length, || async {
            let written = self.store.put(&path, bytes.clone().into()).await;
            written.map(drop).map_err(|error| failed("writing an object failed", &error))
        });
        if let Err(error) = written.await {
            // Nothing points to a partly written object, so remove it at once; if that fails, the sweep removes it.
            if !self.backend.is_remote() {
                drop(self.store.delete(&path).await);
            }
            return Err(error);
        }
        if let Some(unsynced) = &self.unsynced {
            lock(unsynced).insert(id.clone());
        }
        Ok(upload)
    }

    /// Syncs objects that are written but not yet on disk, and each of their folders once.
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        let (Some(unsynced), Some((disk, objects))) = (&self.unsynced, &self.folder) else { return Ok(()) };
        let ids = std::mem::take(&mut *lock(unsynced));
        let work = || {
            let mut folders = BTreeSet::new();
            for id in &ids {
                let shard = objects.join(shard(id));
                match disk.open(&shard.join(id.as_str()), OpenMode::Read) {
                    Ok(object) => object.sync()?,
                    // It was removed meanwhile, because nothing points to it.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                }
                folders.insert(shard);
            }
            folders.iter().try_for_each(|folder| disk.sync_folder(folder))
        };
        work().map_err(|error| {
            lock(unsynced).extend(ids.iter().cloned());
            StoreError::from_io("syncing objects to disk failed", &error)
        })
    }

    /// Returns whether a file object is whole: its size is `bytes`, and it decodes. Objects outside files always are.
    pub(crate) fn is_whole(&self, id: &str, bytes: u64, decodes: impl Fn(&[u8]) -> bool) -> bool {
        let (Some((disk, objects)), Some(id)) = (&self.folder, VersionId::parse(id)) else { return true };
        let found = disk::read(&**disk, &objects.join(shard(&id)).join(id.as_str()));
        found.is_ok_and(|found| found.len() as u64 == bytes && decodes(&found))
    }

    /// Reads an object of exactly `bytes` bytes; `None` if there is no such object.
    pub(crate) async fn get(&self, id: &VersionId, bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let (path, id) = (path(id), id.clone());
        self.run("get", bytes, || async {
            let read = async {
                let found = self.store.get(&path).await?;
                // Checked before reading, so that an unexpectedly large file takes no memory.
                if found.meta.size == bytes { found.bytes().await.map(Ok) } else { Ok(Err(found.meta.size)) }
            };
            match read.await {
                Ok(Ok(bytes)) => Ok(Some(bytes)),
                Ok(Err(found)) => {
                    let reason = format!("its object must have {bytes} bytes, found {found}");
                    Err(StoreError::Corrupt { version: id.clone(), reason })
                }
                Err(object_store::Error::NotFound { .. }) => Ok(None),
                Err(error) => Err(failed("reading an object failed", &error)),
            }
        })
        .await
    }

    /// Returns whether an object of this name exists.
    #[cfg(feature = "postgres")]
    pub(crate) async fn exists(&self, id: &VersionId) -> Result<bool, StoreError> {
        let path = path(id);
        self.run("get", 0, || async {
            match self.store.head(&path).await {
                Ok(_) => Ok(true),
                Err(object_store::Error::NotFound { .. }) => Ok(false),
                Err(error) => Err(failed("reading an object failed", &error)),
            }
        })
        .await
    }

    /// Removes objects and returns the ids that no longer exist, including those that never did.
    pub(crate) async fn delete(&self, ids: Vec<VersionId>) -> Vec<VersionId> {
        let removed = futures_util::stream::iter(ids).map(|id| async move {
            let path = path(&id);
            let deleted = self.run("delete", 0, || async {
                match self.store.delete(&path).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
                    Err(error) => Err(failed("removing an object failed", &error)),
                }
            });
            match deleted.await {
                Ok(()) => Some(id),
                Err(error) => {
                    tracing::warn!(%error, "an object could not be removed; the next sweep tries again");
                    None
                }
            }
        });
        removed.buffer_unordered(8).filter_map(std::future::ready).collect().await
    }

    /// Lists every object with the time when it was written, in batches of at most `batch`. After a failure of a remote
    /// store, the list ends with an error.
    pub(crate) fn batches(&self, batch: usize) -> Batches {
        let is_remote = self.backend.is_remote();
        let named = self.store.list(Some(&Path::from(OBJECTS))).filter_map(move |found| {
            std::future::ready(match found {
                Ok(ObjectMeta { location, last_modified, .. }) => location
                    .filename()
                    .and_then(VersionId::parse)
                    .map(|id| Ok((id, last_modified.timestamp_millis() as u64))),
                Err(error) if is_remote => Some(Err(failed("listing the objects failed", &error))),
                Err(error) => {
                    tracing::warn!(%error, "an object could not be listed");
                    None
                }
            })
        });
        named.chunks(batch).map(|batch| batch.into_iter().collect()).boxed()
    }

    /// Returns the next batch.
    pub(crate) async fn next(&self, batches: &mut Batches) -> Result<Option<Batch>, StoreError> {
        self.backend.run("list", Some(LISTING), async { batches.next().await.transpose() }).await
    }

    /// Returns whether any object exists.
    pub(crate) async fn any(&self) -> Result<bool, StoreError> {
        self.run("list", 0, || async {
            match self.store.list(Some(&Path::from(OBJECTS))).next().await {
                Some(Ok(_)) => Ok(true),
                None => Ok(false),
                Some(Err(error)) => Err(failed("listing the objects failed", &error)),
            }
        })
        .await
    }

    /// Returns whether the object is being written or is not yet in the index.
    pub(crate) fn is_uploading(&self, id: &VersionId) -> bool {
        self.lock().contains(id)
    }

    /// Removes files that an earlier process left partly written; `object_store` names them after the object, followed
    /// by `#` and a number. Returns how many it removed.
    pub(crate) fn remove_temporaries(&self) -> std::io::Result<usize> {
        let Some((disk, objects)) = &self.folder else { return Ok(0) };
        let mut removed = 0;
        for first in 0..=u8::MAX {
            let folder = objects.join(format!("{first:02x}"));
            for name in disk.names(&folder)? {
                let object = name.split_once('#').and_then(|(id, _)| VersionId::parse(id));
                if object.is_some_and(|id| !self.is_uploading(&id)) {
                    match disk.remove(&folder.join(name)) {
                        Ok(()) => removed += 1,
                        // Its writer is alive and has finished meanwhile.
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(removed)
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<VersionId>> {
        lock(&self.uploads)
    }
}

/// Returns an object store of files in `folder`, which other servers may write too. Each write is synced to disk.
///
/// # Errors
/// The folder cannot be created or written.
pub fn folder_objects(folder: &FilePath) -> Result<Arc<dyn ObjectStore>, StoreError> {
    Ok(Arc::new(files(folder, true)?))
}

/// Returns the store of files in a folder, which is created if necessary.
fn files(folder: &FilePath, sync: bool) -> Result<LocalFileSystem, StoreError> {
    let objects = folder.join(OBJECTS);
    // All subfolders are made before any object: otherwise, a concurrent writer could take a folder for durable that
    // another one has just created.
    make_folder(&objects, sync).map_err(|error| unusable(folder, &error))?;
    for first in 0..=u8::MAX {
        std::fs::create_dir_all(objects.join(format!("{first:02x}"))).map_err(|error| unusable(folder, &error))?;
    }
    if sync {
        SystemDisk.sync_folder(&objects).map_err(|error| unusable(folder, &error))?;
    }
    Ok(LocalFileSystem::new_with_prefix(folder).map_err(|error| unusable(folder, &error))?.with_fsync(sync))
}

fn unusable(folder: &FilePath, error: &dyn std::error::Error) -> StoreError {
    StoreError::Unavailable { reason: format!("the folder {}: {error}", folder.display()) }
}

fn lock(ids: &Mutex<HashSet<VersionId>>) -> MutexGuard<'_, HashSet<VersionId>> {
    ids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes other users' access to a folder that an earlier version of the server created.
fn make_private(folder: &FilePath) -> std::io::Result<()> {
    let mode = std::fs::metadata(folder)?.permissions().mode();
    if mode & 0o077 != 0 {
        std::fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        tracing::info!("{} is now readable by this user alone (it had mode {:o})", folder.display(), mode & 0o777);
    }
    Ok(())
}

/// Returns the name of an object's subfolder: the first two digits of its id.
fn shard(id: &VersionId) -> &str {
    &id.as_str()[4..6]
}

fn failed(what: &str, error: &object_store::Error) -> StoreError {
    StoreError::from_io(what, error)
}

fn path(id: &VersionId) -> Path {
    Path::from_iter([OBJECTS, shard(id), id.as_str()])
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.objects.lock().remove(&self.id);
    }
}
