//! The stored bytes of snapshots: one object per version, named after it, and written completely or not at all.

use std::collections::{BTreeSet, HashSet};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};

use super::disk::{self, Disk, OpenMode, SystemDisk};
use super::error::StoreError;
use super::id::VersionId;

/// The folder of the objects, inside the store's folder.
const OBJECTS: &str = "objects";

/// The object store.
#[derive(Clone, Debug)]
pub(crate) struct Objects {
    store: Arc<dyn ObjectStore>,
    /// For objects in files: their disk and folder, where a process that died may have left partly written files.
    folder: Option<(Arc<dyn Disk>, PathBuf)>,
    /// Objects being written, or not yet in the index.
    uploads: Arc<Mutex<HashSet<VersionId>>>,
    /// Objects written but not yet synced to disk; `None` if every write syncs, or nothing is on a disk.
    unsynced: Option<Arc<Mutex<HashSet<VersionId>>>>,
}

/// An object that is being written or is not yet in the index. As long as this lives, it does not count as an orphan.
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
        Self { store, folder: None, uploads: Arc::default(), unsynced: None }
    }

    /// Stores objects as files in `folder`. With `sync`, a write returns once it is on disk.
    pub(crate) fn folder(folder: &FilePath, sync: bool) -> Result<Self, StoreError> {
        let store = files(folder, sync)?;
        make_private(folder).map_err(|error| failed(folder, &error))?;
        Ok(Self::on(Arc::new(SystemDisk), Arc::new(store), folder, sync))
    }

    /// The objects of `store`, which are files in `folder` on this disk. With `sync`, each write syncs its object.
    pub(crate) fn on(disk: Arc<dyn Disk>, store: Arc<dyn ObjectStore>, folder: &FilePath, sync: bool) -> Self {
        let unsynced = (!sync).then(Arc::default);
        Self { folder: Some((disk, folder.join(OBJECTS))), unsynced, ..Self::new(store) }
    }

    /// Writes an object, and syncs it if the store does so.
    pub(crate) async fn put(&self, id: &VersionId, bytes: Bytes) -> Result<Upload, StoreError> {
        self.lock().insert(id.clone());
        let upload = Upload { objects: self.clone(), id: id.clone() };
        match self.store.put(&path(id), bytes.into()).await {
            Ok(_) => {
                if let Some(unsynced) = &self.unsynced {
                    lock(unsynced).insert(id.clone());
                }
                Ok(upload)
            }
            Err(error) => {
                // Nothing points to a partly written object, so it can be removed at once; if that fails, the sweep does it.
                drop(self.store.delete(&path(id)).await);
                Err(StoreError::from_io("writing an object failed", &error))
            }
        }
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

    /// Whether an object was written completely. Where a write returns only once it is on disk, it was.
    pub(crate) fn is_whole(&self, id: &str, bytes: u64, decodes: impl Fn(&[u8]) -> bool) -> bool {
        let (Some((disk, objects)), Some(id)) = (&self.folder, VersionId::parse(id)) else { return true };
        let found = disk::read(&**disk, &objects.join(shard(&id)).join(id.as_str()));
        found.is_ok_and(|found| found.len() as u64 == bytes && decodes(&found))
    }

    /// Reads an object of exactly `bytes` bytes; `None` if there is no such object.
    pub(crate) async fn get(&self, id: &VersionId, bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let read = async {
            let found = self.store.get(&path(id)).await?;
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
            Err(error) => Err(StoreError::from_io("reading an object failed", &error)),
        }
    }

    /// Whether there is an object of this name.
    #[cfg(feature = "postgres")]
    pub(crate) async fn exists(&self, id: &VersionId) -> Result<bool, StoreError> {
        match self.store.head(&path(id)).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(StoreError::from_io("reading an object failed", &error)),
        }
    }

    /// Removes objects and returns the ids that no longer exist, including those that never did.
    pub(crate) async fn delete(&self, ids: Vec<VersionId>) -> Vec<VersionId> {
        let removed = futures_util::stream::iter(ids).map(|id| {
            let store = Arc::clone(&self.store);
            async move {
                match store.delete(&path(&id)).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Some(id),
                    Err(error) => {
                        tracing::warn!(%error, "an object could not be removed; the next sweep tries again");
                        None
                    }
                }
            }
        });
        removed.buffer_unordered(8).filter_map(std::future::ready).collect().await
    }

    /// Lists every object, in batches of at most `batch`.
    pub(crate) fn batches(&self, batch: usize) -> BoxStream<'static, Vec<VersionId>> {
        let batches = self.store.list(Some(&Path::from(OBJECTS))).chunks(batch);
        let named = batches.map(|found| {
            let names = found.into_iter().filter_map(|found| match found {
                Ok(object) => object.location.filename().and_then(VersionId::parse),
                Err(error) => {
                    tracing::warn!(%error, "an object could not be listed");
                    None
                }
            });
            names.collect()
        });
        named.boxed()
    }

    /// Whether any object exists.
    pub(crate) async fn any(&self) -> bool {
        self.store.list(Some(&Path::from(OBJECTS))).next().await.is_some()
    }

    /// Whether the object is being written or not yet in the index.
    pub(crate) fn is_uploading(&self, id: &VersionId) -> bool {
        self.lock().contains(id)
    }

    /// Removes files that an earlier process left partly written: `object_store` names them after the object, `#` and a
    /// number. Returns how many there were.
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

/// An object store of files in `folder`, which other servers may write as well. Each write returns once it is on disk.
///
/// # Errors
/// The folder cannot be created or written.
pub fn folder_objects(folder: &FilePath) -> Result<Arc<dyn ObjectStore>, StoreError> {
    Ok(Arc::new(files(folder, true)?))
}

/// The files in a folder, which is created if necessary.
fn files(folder: &FilePath, sync: bool) -> Result<LocalFileSystem, StoreError> {
    let objects = folder.join(OBJECTS);
    // All subfolders are made before any object, because a concurrent writer could otherwise treat a folder as durable that
    // another has just created.
    make_folder(&objects, sync).map_err(|error| failed(folder, &error))?;
    for first in 0..=u8::MAX {
        std::fs::create_dir_all(objects.join(format!("{first:02x}"))).map_err(|error| failed(folder, &error))?;
    }
    if sync {
        sync_folder(&objects).map_err(|error| failed(folder, &error))?;
    }
    Ok(LocalFileSystem::new_with_prefix(folder).map_err(|error| failed(folder, &error))?.with_fsync(sync))
}

fn failed(folder: &FilePath, error: &dyn std::error::Error) -> StoreError {
    StoreError::Unavailable { reason: format!("the folder {}: {error}", folder.display()) }
}

fn lock(ids: &Mutex<HashSet<VersionId>>) -> MutexGuard<'_, HashSet<VersionId>> {
    ids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes a folder that an earlier version has created to other users of the machine.
fn make_private(folder: &FilePath) -> std::io::Result<()> {
    let mode = std::fs::metadata(folder)?.permissions().mode();
    if mode & 0o077 != 0 {
        std::fs::set_permissions(folder, Permissions::from_mode(0o700))?;
        tracing::info!("{} is now readable by this user alone (it had mode {:o})", folder.display(), mode & 0o777);
    }
    Ok(())
}

/// Creates a folder and its missing ancestors; with `sync`, syncs them to disk.
pub(crate) fn make_folder(folder: &FilePath, sync: bool) -> std::io::Result<()> {
    let existing = folder.ancestors().find(|above| !above.as_os_str().is_empty() && above.exists());
    std::fs::create_dir_all(folder)?;
    if !sync {
        return Ok(());
    }
    // A folder's name is on disk once its parent is synced. Ancestors that already existed may be newly created by another
    // process, so they are synced as well, if they can be opened.
    for ancestor in folder.ancestors() {
        let path = if ancestor.as_os_str().is_empty() { FilePath::new(".") } else { ancestor };
        let synced = sync_folder(path);
        if existing.is_none_or(|existing| ancestor.starts_with(existing)) {
            synced?;
        }
    }
    Ok(())
}

fn sync_folder(folder: &FilePath) -> std::io::Result<()> {
    std::fs::File::open(folder)?.sync_all()
}

/// The subfolder of an object: the first two digits of its id.
fn shard(id: &VersionId) -> &str {
    &id.as_str()[4..6]
}

fn path(id: &VersionId) -> Path {
    Path::from_iter([OBJECTS, shard(id), id.as_str()])
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.objects.lock().remove(&self.id);
    }
}
