//! Backups. The journal can be read while a server writes it, and objects never change, so the store of a running
//! server can be copied: a prefix of the journal, and the objects that it names.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::files::{OBJECTS, failed, make_object_folders, object, require_objects, sync_object_folders};
use crate::session::disk::{Disk as _, OpenMode, SystemDisk, read, write};
use crate::session::embedded::{INDEX, JOURNAL, Listing, OpenIndex, Place, read_journal};
use crate::session::error::StoreError;

/// Maximum number of times the journal is read, if the server removes snapshots during the copy.
const ROUNDS: usize = 20;

/// What a backup or restore copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Number of sessions in the copy.
    pub sessions: usize,
    /// Number of snapshots in the copy.
    pub snapshots: usize,
    /// Number of snapshots copied now; the others were already there.
    pub copied: usize,
    /// Number of snapshots that the copy had but no longer needs.
    pub removed: usize,
    /// Versions whose snapshots could not be copied.
    pub missing: Vec<String>,
}

/// Copies a store to `to`, which may hold an earlier copy. A server may use the store meanwhile.
///
/// # Errors
/// The store has no journal (a server writes one at its next start), its snapshots are elsewhere, or a file cannot be
/// read or written.
pub fn backup(folder: &Path, to: &Path) -> Result<Copied, StoreError> {
    require_objects(folder)?;
    let journal = folder.join(JOURNAL);
    make_object_folders(&SystemDisk, to).map_err(failed(to))?;
    let (mut copied, mut round) = (0, 1);
    loop {
        let file = SystemDisk.open(&journal, OpenMode::Read).map_err(failed(&journal))?;
        let Some(contents) = read_journal(&*file).map_err(|error| error.into_store_error(&journal))? else {
            let reason = "the journal is damaged; start the server once, which rewrites it".to_owned();
            return Err(StoreError::Index { path: journal, reason });
        };
        let length = contents.length;
        let listing = Listing::new(contents.rows);
        let sizes: BTreeMap<&String, u64> = listing.objects().map(|(id, row)| (id, row.bytes)).collect();
        let (new, missing) = copy_objects(folder, to, &sizes)?;
        copied += new;
        // The server has removed these snapshots since, and the journal says so by now.
        if !missing.is_empty() && round < ROUNDS {
            round += 1;
            continue;
        }
        sync_object_folders(&SystemDisk, to).map_err(failed(to))?;
        let mut bytes = vec![0; length as usize];
        file.read_at(&mut bytes, 0).map_err(failed(&journal))?;
        write(&SystemDisk, &to.join(JOURNAL), &bytes).map_err(failed(to))?;
        SystemDisk.sync_folder(to).map_err(failed(to))?;
        let removed = prune(to, &sizes).map_err(failed(to))?;
        let (sessions, snapshots) = (listing.sessions.len(), sizes.len() - missing.len());
        return Ok(Copied { sessions, snapshots, copied, removed, missing });
    }
}

/// Copies the objects that `to` does not have. Returns the number copied, and the ids of those that could not be
/// copied.
fn copy_objects(from: &Path, to: &Path, sizes: &BTreeMap<&String, u64>) -> Result<(usize, Vec<String>), StoreError> {
    let copy = |(id, bytes): (&&String, &u64)| -> Result<Option<String>, StoreError> {
        let (Some(source), Some(target)) = (object(from, id), object(to, id)) else { return Ok(Some((*id).clone())) };
        if fs::metadata(&target).is_ok_and(|file| file.len() == *bytes) {
            return Ok(None);
        }
        match fs::read(&source) {
            Ok(found) if found.len() as u64 == *bytes => {
                write(&SystemDisk, &target, &found).map_err(failed(&target))?;
                Ok(Some(String::new()))
            }
            Ok(_) => Ok(Some((*id).clone())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Some((*id).clone())),
            Err(error) => Err(failed(&source)(error)),
        }
    };
    let done: Vec<String> = sizes.par_iter().map(copy).filter_map(Result::transpose).collect::<Result<_, _>>()?;
    let missing: Vec<String> = done.iter().filter(|id| !id.is_empty()).cloned().collect();
    Ok((done.len() - missing.len(), missing))
}

/// Removes the objects in `folder` that its journal does not name; returns how many.
fn prune(folder: &Path, sizes: &BTreeMap<&String, u64>) -> std::io::Result<usize> {
    let wanted: HashSet<&str> = sizes.keys().map(|id| id.as_str()).collect();
    let mut removed = 0;
    for shard in fs::read_dir(folder.join(OBJECTS))? {
        for file in fs::read_dir(shard?.path())? {
            let file = file?;
            if file.file_name().to_str().is_none_or(|name| !wanted.contains(name)) {
                fs::remove_file(file.path())?;
                removed += 1;
            }
        }
    }
    Ok(removed)
}

/// Creates a store in `folder` from a backup. The folder must not have a store, except one from an interrupted restore
/// of the same backup, which is then completed.
///
/// # Errors
/// The folder has a store, a server uses it, or a file cannot be read or written.
pub fn restore(from: &Path, folder: &Path) -> Result<Copied, StoreError> {
    SystemDisk.make_folder(folder).map_err(failed(folder))?;
    let place = Place::new(Arc::new(SystemDisk), folder);
    // Lock first, so that no server starts on the folder meanwhile.
    let lock = place.lock()?;
    let [index, journal] = [INDEX, JOURNAL].map(|file| folder.join(file));
    let is_begun = journal.exists() && has_backup(from, &journal)?;
    if let Some(path) = [journal, index].into_iter().find(|path| path.exists()).filter(|_| !is_begun) {
        let reason = "it exists; a backup is restored only into a folder without sessions, or again where restoring the \
                      same backup was interrupted";
        return Err(StoreError::Index { path, reason: reason.to_owned() });
    }
    let copied = backup(from, folder)?;
    OpenIndex::open(place, lock, true, &|_, _| true)?.close();
    Ok(copied)
}

/// Returns whether a journal is exactly what restoring the backup writes. If a server has used the store, it is not.
fn has_backup(from: &Path, journal: &Path) -> Result<bool, StoreError> {
    let path = from.join(JOURNAL);
    let file = SystemDisk.open(&path, OpenMode::Read).map_err(failed(&path))?;
    let Some(contents) = read_journal(&*file).map_err(|error| error.into_store_error(&path))? else { return Ok(false) };
    let mut bytes = vec![0; contents.length as usize];
    file.read_at(&mut bytes, 0).map_err(failed(&path))?;
    Ok(read(&SystemDisk, journal).map_err(failed(journal))? == bytes)
}
