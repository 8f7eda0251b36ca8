//! Where an index is stored, and the lock that gives one process exclusive use of its folder.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::session::disk::{Disk, DiskFile, OpenMode};
use crate::session::error::StoreError;

/// The name of the index file in a store's folder.
pub(crate) const INDEX: &str = "index.redb";

/// The name of the journal file, beside the index.
pub(crate) const JOURNAL: &str = "index.journal";

/// The file that is locked while the folder is in use. It stays when the index is removed or replaced.
const LOCK: &str = "lock";

/// How long to wait for a previous store of this process that is still closing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// The path of an index file, and its disk.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) path: PathBuf,
}

/// A locked folder; it is unlocked once all clones of this are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Lock {
    _files: Vec<Arc<dyn DiskFile>>,
}

impl Place {
    pub(crate) fn new(disk: Arc<dyn Disk>, folder: &Path) -> Self {
        Self { disk, path: folder.join(INDEX) }
    }

    pub(super) fn journal(&self) -> PathBuf {
        self.path.with_file_name(JOURNAL)
    }

    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Syncs the folder, so that the names of its files are durable.
    pub(super) fn sync_folder(&self) -> io::Result<()> {
        self.disk.sync_folder(self.folder())
    }

    /// Locks the folder, which must exist. Refuses if another process uses it.
    pub(crate) fn lock(&self) -> Result<Lock, StoreError> {
        let failed = |error: io::Error| StoreError::from_io("locking the store's folder failed", &error);
        let file = self.disk.open(&self.path.with_file_name(LOCK), OpenMode::Create).map_err(failed)?;
        self.take(&*file)?;
        Ok(Lock { _files: vec![file] })
    }

    /// Like [`Self::lock`], but creates nothing and also locks the file that servers of earlier versions lock.
    pub(super) fn lock_existing(&self) -> Result<Lock, StoreError> {
        let failed = |error: io::Error| StoreError::from_io("locking the store's folder failed", &error);
        let mut files = Vec::new();
        for path in [self.path.with_file_name(LOCK), self.path.clone()] {
            match self.disk.open(&path, OpenMode::Read) {
                Ok(file) => {
                    self.take(&*file)?;
                    files.push(file);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(Lock { _files: files })
    }

    /// Locks a file, waiting a little if it is in use.
    pub(super) fn take(&self, file: &dyn DiskFile) -> Result<(), StoreError> {
        let started = Instant::now();
        while !file.try_lock().map_err(|error| StoreError::from_io("locking a file failed", &error))? {
            if started.elapsed() >= CLOSE_TIMEOUT {
                return Err(StoreError::InUse { path: self.path.clone() });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    pub(super) fn refusal(&self, reason: impl Into<String>) -> StoreError {
        StoreError::Index { path: self.path.clone(), reason: reason.into() }
    }
}

/// Returns the error for a file that a later version of the server wrote.
pub(super) fn later(path: &Path, found: u64, known: u64) -> StoreError {
    let reason = format!(
        "it has format version {found}, and this version of Tidegate reads up to version {known}; use the version of \
         Tidegate that wrote it, or a later one"
    );
    StoreError::Index { path: path.to_owned(), reason }
}
