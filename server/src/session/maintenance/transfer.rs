//! Moves sessions between a store's folder and files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::files::{OBJECTS, failed, is_whole, make_object_folders, object, require_objects};
use super::session_file::Files;
use crate::session::disk::{Disk, write};
use crate::session::embedded::{IndexError, OpenIndex, Place, Write, Writer, inspect};
use crate::session::error::StoreError;
use crate::session::id::SessionId;
use crate::session::index::{Listed, SessionRow, Transaction, Transfer, VersionRow, text_chains};

/// Maximum number of sessions imported in one transaction.
const BATCH: usize = 256;

/// What an export or import has moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of sessions.
    pub sessions: usize,
    /// Number of snapshot files.
    pub snapshots: usize,
    /// Sessions that were skipped, and why.
    pub skipped: Vec<String>,
}

/// Writes every session of a store that no server uses to `to`.
///
/// # Errors
/// A server uses the store, or a file cannot be read or written.
pub fn export(folder: &Path, to: &Path) -> Result<Moved, StoreError> {
    require_objects(folder)?;
    let listing = inspect(folder)?;
    let files = Files::new(to);
    files.create()?;
    let mut moved = Moved { skipped: listing.problems.clone(), ..Moved::default() };
    for (id, _) in listing.objects() {
        let Some(path) = object(folder, id) else { continue };
        match fs::read(&path).map_err(failed(&path)) {
            Ok(bytes) => {
                files.write_snapshot(id, &bytes)?;
                moved.snapshots += 1;
            }
            Err(error) => moved.skipped.push(format!("version {id}: {error}")),
        }
    }
    for (name, row) in &listing.sessions {
        let Some(id) = SessionId::parse(name) else {
            moved.skipped.push(format!("session {name}: its id is invalid"));
            continue;
        };
        let lineage = listing.lineages.get(name).map_or(&[][..], Vec::as_slice);
        let versions = lineage.iter().filter_map(|entry| {
            let row = listing.versions.get(&entry.version)?.clone();
            Some(Listed { id: entry.version.clone(), row, kept: entry.kept })
        });
        let versions: Vec<_> = versions.collect();
        let texts = text_chains(&listing.texts, versions.iter().map(|version| version.id.as_str()));
        files.write(Transfer { id, row: row.clone(), versions, texts })?;
        moved.sessions += 1;
    }
    files.sync()?;
    Ok(moved)
}

/// Adds the sessions that [`export`] wrote to `from`, under the same ids. Skips sessions that exist already. After a
/// crash, the store has some of the sessions, each of them whole; importing again adds the others.
///
/// # Errors
/// A server uses the store, or a file cannot be read or written.
pub async fn import(disk: Arc<dyn Disk>, folder: &Path, from: &Path) -> Result<Moved, StoreError> {
    require_objects(folder)?;
    let make = || -> std::io::Result<()> {
        make_object_folders(&*disk, folder)?;
        folder
            .ancestors()
            .skip(1)
            .take(1)
            .chain([folder, &folder.join(OBJECTS)])
            .try_for_each(|it| disk.sync_folder(it))
    };
    make().map_err(failed(folder))?;
    let place = Place::new(Arc::clone(&disk), folder);
    let lock = place.lock()?;
    let index = OpenIndex::open(place, lock, true, &|id, bytes| is_whole(&*disk, folder, id, bytes))?;
    let index = Arc::new(index);
    let writer = Writer::start(Arc::clone(&index), true, Box::new(|_| {}), Box::new(|| Ok(())))?;
    let (mut moved, files) = (Moved::default(), Files::new(from));
    for batch in files.paths()?.chunks(BATCH) {
        import_batch(&*disk, folder, &files, batch, &writer, &mut moved).await?;
    }
    writer.stop();
    index.close();
    Ok(moved)
}

/// Adds the sessions of these files in one transaction, once their objects and the names of the objects are on disk.
async fn import_batch(
    disk: &dyn Disk,
    folder: &Path,
    files: &Files,
    paths: &[PathBuf],
    writer: &Writer,
    moved: &mut Moved,
) -> Result<(), StoreError> {
    let read = |path: &PathBuf| {
        let session = files.read(path)?;
        let objects = write_objects(disk, folder, files, &session)?;
        Ok((session, objects))
    };
    // Read them one after another, because sessions share objects.
    let done: Vec<Result<_, String>> = paths.iter().map(read).collect();
    let (mut names, mut sessions, mut objects) = (Vec::new(), Vec::new(), Vec::new());
    for (path, done) in paths.iter().zip(done) {
        match done {
            Ok((session, written)) => {
                names.push(path.display().to_string());
                sessions.push(session);
                objects.push(written);
            }
            Err(reason) => moved.skipped.push(format!("{}: {reason}", path.display())),
        }
    }
    let folders: BTreeSet<&Path> = objects.iter().flatten().filter_map(|path| path.parent()).collect();
    folders.into_iter().try_for_each(|folder| disk.sync_folder(folder)).map_err(failed(folder))?;
    let added = writer
        .run(move |write| sessions.iter().map(|session| add(write, session)).collect::<Result<Vec<_>, _>>())
        .await?;
    for ((name, objects), added) in names.into_iter().zip(objects).zip(added) {
        match added {
            Ok(()) => (moved.sessions, moved.snapshots) = (moved.sessions + 1, moved.snapshots + objects.len()),
            Err(reason) => moved.skipped.push(format!("{name}: {reason}")),
        }
    }
    Ok(())
}

/// Writes the missing objects of a session's versions. Returns the paths of all its objects.
fn write_objects(disk: &dyn Disk, folder: &Path, files: &Files, session: &Transfer) -> Result<Vec<PathBuf>, String> {
    let mut paths = Vec::new();
    for (id, bytes) in session.objects() {
        let Some(path) = object(folder, id) else { continue };
        let found = files.read_snapshot(id, bytes)?;
        if !is_whole(disk, folder, id, bytes) {
            write(disk, &path, &found).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Adds a session and its versions; the inner error says why it is skipped.
fn add(write: &mut Write<'_>, session: &Transfer) -> Result<Result<(), String>, IndexError> {
    let Transfer { id, row: SessionRow { owner, .. }, versions, texts } = session;
    if write.tables.session(id.as_str())?.is_some() {
        return Ok(Err("the session exists already".to_owned()));
    }
    for version in versions {
        if write.tables.version(&version.id)?.is_some_and(|row| row.owner != *owner) {
            return Ok(Err(format!("version {} belongs to another owner", version.id)));
        }
    }
    let mut added = BTreeSet::new();
    for Listed { id, row, kept } in versions {
        if write.tables.version(id)?.is_none() {
            added.insert(id.as_str());
            write.add_version(id, &VersionRow { kept_by: 0, known_by: 0, ..row.clone() })?;
        }
        write.point(id, i64::from(*kept), 1)?;
        if *kept {
            // The object exists again, and must not be removed as garbage.
            write.remove_garbage(std::slice::from_ref(id))?;
        }
    }
    let listed: Vec<_> = versions.iter().map(|version| (version.id.clone(), version.kept)).collect();
    write.add_session(id.as_str(), session.row.clone(), &listed)?;
    for (version, row) in texts {
        if let Err(reason) = write.import_text(*owner, version, row, added.contains(version.as_str()))? {
            tracing::warn!(session = %id, reason, "a text is left out, and those that continue it");
        }
    }
    Ok(Ok(()))
}
