//! The ballast: a file that reserves disk space, so that removals can still be recorded when the disk is full.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::session::disk::{Disk, OpenMode};
use crate::session::error::StoreError;

/// The name of the file in the store's folder.
const FILE: &str = "ballast";

/// More space than an index transaction that removes something needs.
const BYTES: usize = 1 << 20;

/// The ballast file.
#[derive(Clone, Debug)]
pub(super) struct Ballast {
    disk: Arc<dyn Disk>,
    path: Option<PathBuf>,
    pub(super) missing: Arc<AtomicBool>,
    /// Held while the ballast's space is in use, or while the file is restored.
    pub(super) in_use: Arc<tokio::sync::Mutex<()>>,
}

impl Ballast {
    /// Creates the ballast of the store in `folder`; `None` for a store in memory.
    pub(super) fn new(disk: Arc<dyn Disk>, folder: Option<&Path>) -> Self {
        let path = folder.map(|folder| folder.join(FILE));
        let length = |path: &PathBuf| disk.open(path, OpenMode::Read).and_then(|file| file.len());
        let exists = path.as_ref().is_none_or(|path| length(path).is_ok_and(|length| length == BYTES as u64));
        Self { disk, path, missing: Arc::new(AtomicBool::new(!exists)), in_use: Arc::default() }
    }

    /// Writes the file again. Until there is space for it, nothing else may be stored.
    pub(super) fn restore(&self) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        let write = || {
            let file = self.disk.open(path, OpenMode::Replace)?;
            file.write_at(&vec![0xff; BYTES], 0)?;
            file.sync()
        };
        if let Err(error) = write() {
            drop(self.disk.remove(path));
            return Err(StoreError::from_io("writing the ballast file failed", &error));
        }
        self.missing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Removes the file to free its space; returns false if there was none.
    pub(super) fn release(&self) -> bool {
        self.path
            .as_ref()
            .is_some_and(|path| !self.missing.swap(true, Ordering::SeqCst) && self.disk.remove(path).is_ok())
    }
}
