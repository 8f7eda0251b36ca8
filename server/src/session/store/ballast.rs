//! Space held back on the disk, so that on a full one there is still room to write down what is removed.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Inner, blocking};
use crate::session::StoreError;
use crate::session::index::{Fault, Write};

/// The file in the store's folder.
pub(super) const FILE: &str = "ballast";

/// More than a transaction of the index that removes something needs.
const BYTES: usize = 1 << 20;

/// A file that is there to be removed.
#[derive(Clone, Debug)]
pub(super) struct Ballast {
    path: Option<PathBuf>,
    gone: Arc<AtomicBool>,
    /// Held while it is in use for removing, or put back.
    in_use: Arc<tokio::sync::Mutex<()>>,
}

impl Ballast {
    /// None where nothing is on a disk.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        let there = path.as_ref().is_none_or(|path| fs::metadata(path).is_ok_and(|file| file.len() == BYTES as u64));
        Self { path, gone: Arc::new(AtomicBool::new(!there)), in_use: Arc::default() }
    }

    /// Puts it back where it has been taken; as long as there is no space for it, there is none for anything else.
    fn restore(&self) -> Result<(), StoreError> {
        let Some(path) = &self.path else { return Ok(()) };
        let write = || {
            let mut file = fs::File::create(path)?;
            file.write_all(&vec![0xff; BYTES])?;
            file.sync_all()
        };
        if let Err(error) = write() {
            drop(fs::remove_file(path));
            return Err(StoreError::from_io("the space held back could not be written", &error));
        }
        self.gone.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Gives its space to the disk; false where it has none.
    pub(super) fn release(&self) -> bool {
        self.path.as_ref().is_some_and(|path| !self.gone.swap(true, Ordering::SeqCst) && fs::remove_file(path).is_ok())
    }
}

impl Inner {
    /// Puts the space held back where it was, after who has it in use for removing; refuses where there is none.
    pub(super) async fn ballast(&self) -> Result<(), StoreError> {
        if !self.ballast.gone.load(Ordering::SeqCst) {
            return Ok(());
        }
        // Who removes has used it by then, or another has put it back.
        let _alone = self.ballast.in_use.lock().await;
        if !self.ballast.gone.load(Ordering::SeqCst) {
            return Ok(());
        }
        let ballast = self.ballast.clone();
        blocking(move || ballast.restore()).await
    }

    /// A transaction that removes, on a full disk too. It is on disk then: what was removed does not come back.
    pub(super) async fn free<T: Send + 'static>(
        &self,
        work: impl FnMut(&mut Write<'_>) -> Result<T, Fault> + Clone + Send + 'static,
    ) -> Result<T, StoreError> {
        match self.writer.run_to_disk(work.clone()).await {
            Err(StoreError::Full { .. }) => {
                // Nobody takes the space that is given back before this has used it.
                let _alone = self.ballast.in_use.lock().await;
                self.ballast.release();
                self.writer.run_to_disk(work).await
            }
            end => end,
        }
    }
}
