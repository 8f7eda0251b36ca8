//! Where an index is, and the lock that keeps its folder to one process.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::session::disk::{Disk, DiskFile, OpenMode};
use crate::session::error::StoreError;

/// The file of the index in a store's folder.
pub(crate) const INDEX: &str = "index.redb";

/// The file of the journal, beside the index.
pub(crate) const JOURNAL: &str = "index.journal";

/// The file that is locked while the folder is used. It stays when the index is removed or replaced.
const LOCK: &str = "lock";

/// How long to wait for a previous store in this process that is still closing.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// The file of an index, and its disk.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) path: PathBuf,
}

/// A locked folder, until all clones of this are dropped.
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

    /// Syncs the folder, so that the names of its files are on disk.
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

    /// As [`Self::lock`], but creates nothing, and takes the lock that servers of earlier versions know as well.
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

    /// Takes a file's lock, waiting a little.
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

/// The refusal of a file that a later version of the server wrote.
pub(super) fn later(path: &Path, found: u64, known: u64) -> StoreError {
    let reason = format!(
        "it has format version {found}, and this version of Tidegate reads up to version {known}; use the version of \
         Tidegate that wrote it, or a later one"
    );
    StoreError::Index { path: path.to_owned(), reason }
}
