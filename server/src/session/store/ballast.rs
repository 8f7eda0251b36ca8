//! A file that reserves disk space, so that removals can still be recorded when the disk is full.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::session::error::StoreError;

/// The file in the store's folder.
pub(super) const FILE: &str = "ballast";

/// More than an index transaction that removes something needs.
const BYTES: usize = 1 << 20;

/// The ballast file.
#[derive(Clone, Debug)]
pub(super) struct Ballast {
    path: Option<PathBuf>,
    pub(super) missing: Arc<AtomicBool>,
    /// Held while its space is in use, or while it is restored.
    pub(super) in_use: Arc<tokio::sync::Mutex<()>>,
}

impl Ballast {
    /// `path` is `None` for a store in memory.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        let exists = path.as_ref().is_none_or(|path| fs::metadata(path).is_ok_and(|file| file.len() == BYTES as u64));
        Self { path, missing: Arc::new(AtomicBool::new(!exists)), in_use: Arc::default() }
    }

    /// Writes the file again. Until there is space for it, nothing else may be stored.
    pub(super) fn restore(&self) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        let write = || {
            let mut file = fs::File::create(path)?;
            file.write_all(&vec![0xff; BYTES])?;
            file.sync_all()
        };
        if let Err(error) = write() {
            drop(fs::remove_file(path));
            return Err(StoreError::from_io("writing the ballast file failed", &error));
        }
        self.missing.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Removes the file to free its space; false if there is none.
    pub(super) fn release(&self) -> bool {
        self.path
            .as_ref()
            .is_some_and(|path| !self.missing.swap(true, Ordering::SeqCst) && fs::remove_file(path).is_ok())
    }
}
