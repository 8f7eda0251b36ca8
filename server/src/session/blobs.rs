//! The bytes of snapshots: one object each, written whole or not at all, under the name of its version.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};

use super::{StoreError, VersionId};

/// The folder of the objects, below the store's own.
const OBJECTS: &str = "objects";

/// Where the objects are.
#[derive(Clone, Debug)]
pub(crate) struct Blobs {
    store: Arc<dyn ObjectStore>,
    /// Where they are files: those that were being written when a process died lie here too.
    folder: Option<PathBuf>,
    /// Being written, or waiting for the index to point to them.
    coming: Arc<Mutex<HashSet<VersionId>>>,
    /// Written and not on disk yet, where a write does not see to that; none elsewhere.
    unsynced: Option<Arc<Mutex<HashSet<VersionId>>>>,
}

/// An object on its way: as long as this lives, nobody takes it for one that nothing points to.
#[derive(Debug)]
pub(crate) struct Coming {
    blobs: Blobs,
    id: VersionId,
}

impl Blobs {
    pub(crate) fn memory() -> Self {
        Self::over(Arc::new(InMemory::new()))
    }

    pub(crate) fn over(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, folder: None, coming: Arc::default(), unsynced: None }
    }

    /// Objects as files below `folder`; `sync` when they are to be on disk before a write returns.
    pub(crate) fn folder(folder: &FilePath, sync: bool) -> Result<Self, StoreError> {
        let failed = |error: &dyn std::error::Error| StoreError::Unavailable {
            reason: format!("the folder {}: {error}", folder.display()),
        };
        let objects = folder.join(OBJECTS);
        // All at once and before there is any object: of two writers, one could take a folder for durable that the
        // other has only just made.
        make_folder(&objects, sync).map_err(|error| failed(&error))?;
        for first in 0..=u8::MAX {
            std::fs::create_dir_all(objects.join(format!("{first:02x}"))).map_err(|error| failed(&error))?;
        }
        if sync {
            sync_folder(&objects).map_err(|error| failed(&error))?;
        }
        let store = LocalFileSystem::new_with_prefix(folder).map_err(|error| failed(&error))?.with_fsync(sync);
        let unsynced = (!sync).then(Arc::default);
        Ok(Self { folder: Some(objects), unsynced, ..Self::over(Arc::new(store)) })
    }

    /// Keeps the object, durably where the store is so.
    pub(crate) async fn put(&self, id: &VersionId, bytes: Bytes) -> Result<Coming, StoreError> {
        self.lock().insert(id.clone());
        let coming = Coming { blobs: self.clone(), id: id.clone() };
        match self.store.put(&path(id), bytes.into()).await {
            Ok(_) => {
                if let Some(unsynced) = &self.unsynced {
                    lock(unsynced).insert(id.clone());
                }
                Ok(coming)
            }
            Err(error) => {
                // Nothing points to it yet, so half an object may go at once. What cannot go now is swept up later.
                drop(self.store.delete(&path(id)).await);
                Err(StoreError::from_io("an object could not be written", &error))
            }
        }
    }

    /// Puts on disk what was written and is not there yet: each object, and each folder that names one, once.
    pub(crate) fn settle(&self) -> Result<(), StoreError> {
        let (Some(unsynced), Some(objects)) = (&self.unsynced, &self.folder) else { return Ok(()) };
        let taken = std::mem::take(&mut *lock(unsynced));
        let work = || {
            let mut folders = BTreeSet::new();
            for id in &taken {
                let shard = objects.join(shard(id));
                match std::fs::File::open(shard.join(id.as_str())) {
                    Ok(object) => object.sync_all()?,
                    // Nothing pointed to it any more, or will.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                }
                folders.insert(shard);
            }
            folders.iter().try_for_each(|folder| sync_folder(folder))
        };
        work().map_err(|error| {
            lock(unsynced).extend(taken.iter().cloned());
            StoreError::from_io("objects could not be put on disk", &error)
        })
    }

    /// The object of that many bytes, or none where there is no such object.
    pub(crate) async fn get(&self, id: &VersionId, bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let read = async {
            let found = self.store.get(&path(id)).await?;
            // Before it is read: a file that grew, however it did, takes no memory.
            if found.meta.size == bytes { found.bytes().await.map(Ok) } else { Ok(Err(found.meta.size)) }
        };
        match read.await {
            Ok(Ok(bytes)) => Ok(Some(bytes)),
            Ok(Err(found)) => {
                let reason = format!("its object has {found} bytes, {bytes} were written");
                Err(StoreError::Corrupt { version: id.clone(), reason })
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(StoreError::from_io("an object could not be read", &error)),
        }
    }

    /// Removes objects; returns those that are gone, those that were never there as well.
    pub(crate) async fn delete(&self, ids: Vec<VersionId>) -> Vec<VersionId> {
        let removed = futures_util::stream::iter(ids).map(|id| {
            let store = Arc::clone(&self.store);
            async move {
                match store.delete(&path(&id)).await {
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => Some(id),
                    Err(error) => {
                        tracing::warn!(%error, "an object could not be removed, later is another try");
                        None
                    }
                }
            }
        });
        removed.buffer_unordered(8).filter_map(std::future::ready).collect().await
    }

    /// Every object that is there, in lots of at most `lot`.
    pub(crate) fn lots(&self, lot: usize) -> BoxStream<'static, Vec<VersionId>> {
        let lots = self.store.list(Some(&Path::from(OBJECTS))).chunks(lot);
        let named = lots.map(|found| {
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

    /// Whether there is any object.
    pub(crate) async fn any(&self) -> bool {
        self.store.list(Some(&Path::from(OBJECTS))).next().await.is_some()
    }

    /// Whether the object is being written or waits for the index.
    pub(crate) fn coming(&self, id: &VersionId) -> bool {
        self.lock().contains(id)
    }

    /// Removes what a process that died was writing: files under the temporary names of `object_store`, which are an
    /// object's name, `#` and a number. Returns how many there were.
    pub(crate) fn remove_temporaries(&self) -> std::io::Result<usize> {
        let Some(objects) = &self.folder else { return Ok(0) };
        let mut removed = 0;
        for folder in std::fs::read_dir(objects)? {
            let folder = folder?.path();
            if !folder.is_dir() {
                continue;
            }
            for file in std::fs::read_dir(folder)? {
                let file = file?;
                let name = file.file_name();
                let object =
                    name.to_str().and_then(|name| name.split_once('#')).and_then(|(id, _)| VersionId::parse(id));
                if object.is_some_and(|id| !self.coming(&id)) {
                    match std::fs::remove_file(file.path()) {
                        Ok(()) => removed += 1,
                        // Its writer lives, and was done with it meanwhile.
                        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(removed)
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<VersionId>> {
        lock(&self.coming)
    }
}

fn lock(ids: &Mutex<HashSet<VersionId>>) -> MutexGuard<'_, HashSet<VersionId>> {
    ids.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a folder and those above it that are missing; with `sync`, on disk.
pub(crate) fn make_folder(folder: &FilePath, sync: bool) -> std::io::Result<()> {
    let there = folder.ancestors().find(|above| !above.as_os_str().is_empty() && above.exists());
    std::fs::create_dir_all(folder)?;
    if !sync {
        return Ok(());
    }
    // Each is named by the one above it. Those that were there may have been made a moment ago as well; not all of
    // them may be opened.
    for made in folder.ancestors() {
        let here = if made.as_os_str().is_empty() { FilePath::new(".") } else { made };
        let synced = sync_folder(here);
        if there.is_none_or(|there| made.starts_with(there)) {
            synced?;
        }
    }
    Ok(())
}

fn sync_folder(folder: &FilePath) -> std::io::Result<()> {
    std::fs::File::open(folder)?.sync_all()
}

/// The folder of an object, by its id's first digits.
fn shard(id: &VersionId) -> &str {
    &id.as_str()[4..6]
}

/// Spread over 256 folders.
fn path(id: &VersionId) -> Path {
    Path::from_iter([OBJECTS, shard(id), id.as_str()])
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.blobs.lock().remove(&self.id);
    }
}
