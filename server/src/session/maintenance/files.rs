//! Where objects are in a store's folder.

use std::io;
use std::path::{Path, PathBuf};

use crate::session::disk::{self, Disk};
use crate::session::embedded::JOURNAL;
use crate::session::error::StoreError;
use crate::session::format::check_digest;
use crate::session::id::VersionId;

/// The name of the folder of objects in a store's folder.
pub(super) const OBJECTS: &str = "objects";

/// Returns the path of an object in a store's folder; `None` if the index contains an invalid id.
pub(super) fn object(folder: &Path, version: &str) -> Option<PathBuf> {
    VersionId::parse(version).map(|_| folder.join(OBJECTS).join(&version[4..6]).join(version))
}

/// Refuses a store whose snapshots are not in its folder.
pub(super) fn require_objects(folder: &Path) -> Result<(), StoreError> {
    if folder.join(JOURNAL).exists() && !folder.join(OBJECTS).exists() {
        let reason = format!(
            "the snapshots of {} are in another store (--store); copy that store with its own tools, and the folder while no \
             server uses it",
            folder.display()
        );
        return Err(StoreError::Unavailable { reason });
    }
    Ok(())
}

/// Returns whether an object in a store's folder is as it was written.
pub(super) fn is_whole(disk: &dyn Disk, folder: &Path, version: &str, bytes: u64) -> bool {
    let found = object(folder, version).and_then(|path| disk::read(disk, &path).ok());
    found.is_some_and(|found| found.len() as u64 == bytes && check_digest(&found).is_ok())
}

/// Creates the folders of the objects.
pub(super) fn make_object_folders(disk: &dyn Disk, folder: &Path) -> io::Result<()> {
    (0..=u8::MAX).try_for_each(|first| disk.make_folder(&folder.join(OBJECTS).join(format!("{first:02x}"))))
}

pub(super) fn sync_object_folders(disk: &dyn Disk, folder: &Path) -> io::Result<()> {
    (0..=u8::MAX).try_for_each(|first| disk.sync_folder(&folder.join(OBJECTS).join(format!("{first:02x}"))))?;
    disk.sync_folder(&folder.join(OBJECTS))?;
    disk.sync_folder(folder)
}

/// Converts an I/O error, adding the path that it concerns.
pub(super) fn failed(path: &Path) -> impl Fn(io::Error) -> StoreError + '_ {
    move |error| StoreError::from_io(&path.display().to_string(), &error)
}
