//! Sessions as files: one JSON file for each session, and one snapshot file for each version that has a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::files::{OBJECTS, failed, is_whole, make_object_folders, object, require_objects};
use super::texts;
use crate::session::conversation::Ancestor;
use crate::session::disk::{Disk, SystemDisk, write};
use crate::session::embedded::{IndexError, OpenIndex, Place, Write, Writer, inspect};
use crate::session::error::StoreError;
use crate::session::format::check_digest;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{SessionRow, VersionRow};
use crate::session::tag::TagName;

const SESSIONS: &str = "sessions";
const SNAPSHOTS: &str = "snapshots";
const TEXTS: &str = "texts";

/// Most sessions that are imported in one transaction.
const BATCH: usize = 256;

/// What an export or import moved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of sessions.
    pub sessions: usize,
    /// Number of snapshot files.
    pub snapshots: usize,
    /// Sessions that were left out, and why.
    pub skipped: Vec<String>,
}

/// A session's file.
#[derive(Serialize, Deserialize)]
struct SessionFile {
    id: String,
    owner: Owner,
    created: u64,
    updated: u64,
    used: u64,
    ttl_seconds: Option<u64>,
    metadata: BTreeMap<String, String>,
    forked_from: Option<(String, String)>,
    /// The current version.
    version: String,
    /// Oldest first.
    versions: Vec<VersionFile>,
    /// Versions by name.
    #[serde(default)]
    tags: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct VersionFile {
    id: String,
    parent: Option<String>,
    label: Option<String>,
    kind: String,
    tokens: u64,
    time: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    bytes: u64,
    seed: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    origin: Vec<Ancestor>,
    /// Whether its snapshot is kept.
    kept: bool,
    /// The session that made it.
    #[serde(default)]
    session: Option<String>,
}

/// Writes every session of a store that no server uses to `to`.
///
/// # Errors
/// A server uses the store, or a file cannot be read or written.
pub fn export(folder: &Path, to: &Path) -> Result<Moved, StoreError> {
    require_objects(folder)?;
    let listing = inspect(folder)?;
    let [sessions, snapshots, texts] = [SESSIONS, SNAPSHOTS, TEXTS].map(|name| to.join(name));
    for folder in [&sessions, &snapshots, &texts] {
        SystemDisk.make_folder(folder).map_err(failed(folder))?;
    }
    let mut moved = Moved { skipped: listing.problems.clone(), ..Moved::default() };
    for (id, _) in listing.objects() {
        let Some(path) = object(folder, id) else { continue };
        match fs::read(&path).map_err(failed(&path)) {
            Ok(bytes) => {
                write(&SystemDisk, &snapshots.join(format!("{id}.tidegate")), &bytes).map_err(failed(&snapshots))?;
                moved.snapshots += 1;
            }
            Err(error) => moved.skipped.push(format!("version {id}: {error}")),
        }
    }
    for (id, row) in &listing.sessions {
        let lineage = listing.lineages.get(id).map_or(&[][..], Vec::as_slice);
        let versions = lineage.iter().filter_map(|entry| {
            let row = listing.versions.get(&entry.version)?.clone();
            Some(VersionFile {
                id: entry.version.clone(),
                parent: row.parent,
                label: row.label,
                kind: row.kind,
                tokens: row.tokens,
                time: row.time,
                prompt_tokens: row.prompt_tokens,
                completion_tokens: row.completion_tokens,
                bytes: row.bytes,
                seed: row.seed,
                origin: row.origin,
                kept: entry.kept,
                session: row.session,
            })
        });
        let file = SessionFile {
            id: id.clone(),
            owner: row.owner,
            created: row.created,
            updated: row.updated,
            used: row.used,
            ttl_seconds: row.ttl,
            metadata: row.metadata.clone(),
            forked_from: row.forked_from.clone(),
            version: row.head.clone(),
            versions: versions.collect(),
            tags: row.tags.clone(),
        };
        let rows = texts::encode(&listing, file.versions.iter().map(|version| version.id.as_str()));
        write(&SystemDisk, &texts.join(format!("{id}.text")), &rows).map_err(failed(&texts))?;
        let text = serde_json::to_vec_pretty(&file).map_err(|error| unreadable(id, &error))?;
        write(&SystemDisk, &sessions.join(format!("{id}.json")), &text).map_err(failed(&sessions))?;
        moved.sessions += 1;
    }
    for folder in [&sessions, &snapshots, &texts] {
        SystemDisk.sync_folder(folder).map_err(failed(folder))?;
    }
    Ok(moved)
}

fn unreadable(what: &str, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Unavailable { reason: format!("{what}: {error}") }
}

/// Adds the sessions that [`export`] wrote to `from`, under the same ids. Sessions that exist already are left out. After a
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
    let (mut moved, sessions) = (Moved::default(), from.join(SESSIONS));
    let mut paths: Vec<_> = fs::read_dir(&sessions)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<Result<_, _>>())
        .map_err(failed(&sessions))?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    for batch in paths.chunks(BATCH) {
        import_batch(&*disk, folder, from, batch, &writer, &mut moved).await?;
    }
    writer.stop();
    index.close();
    Ok(moved)
}

/// Adds the sessions of these files in one transaction, after their objects and the names of those are on disk.
async fn import_batch(
    disk: &dyn Disk,
    folder: &Path,
    from: &Path,
    paths: &[PathBuf],
    writer: &Writer,
    moved: &mut Moved,
) -> Result<(), StoreError> {
    let read = |path: &PathBuf| {
        let text = fs::read(path).map_err(|error| error.to_string())?;
        let file = serde_json::from_slice::<SessionFile>(&text).map_err(|error| error.to_string())?;
        let objects = write_objects(disk, folder, from, &file)?;
        let texts = texts::read(&from.join(TEXTS).join(format!("{}.text", file.id)))?;
        Ok(((file, texts), objects))
    };
    // One after another, because sessions share objects.
    let done: Vec<Result<_, String>> = paths.iter().map(read).collect();
    let (mut names, mut files, mut objects) = (Vec::new(), Vec::new(), Vec::new());
    for (path, done) in paths.iter().zip(done) {
        match done {
            Ok((file, written)) => {
                names.push(path.display().to_string());
                files.push(file);
                objects.push(written);
            }
            Err(reason) => moved.skipped.push(format!("{}: {reason}", path.display())),
        }
    }
    let folders: BTreeSet<&Path> = objects.iter().flatten().filter_map(|path| path.parent()).collect();
    folders.into_iter().try_for_each(|folder| disk.sync_folder(folder)).map_err(failed(folder))?;
    let added = writer
        .run(move |write| files.iter().map(|(file, texts)| add(write, file, texts)).collect::<Result<Vec<_>, _>>())
        .await?;
    for ((name, objects), added) in names.into_iter().zip(objects).zip(added) {
        match added {
            Ok(()) => (moved.sessions, moved.snapshots) = (moved.sessions + 1, moved.snapshots + objects.len()),
            Err(reason) => moved.skipped.push(format!("{name}: {reason}")),
        }
    }
    Ok(())
}

/// Checks a session's file and writes the objects of its versions that do not exist yet. Returns the paths of all.
fn write_objects(disk: &dyn Disk, folder: &Path, from: &Path, file: &SessionFile) -> Result<Vec<PathBuf>, String> {
    SessionId::parse(&file.id).ok_or("the id is not that of a session")?;
    if !file.versions.iter().any(|version| version.kept && version.id == file.version) {
        return Err("its current version is not among those that it keeps".to_owned());
    }
    for (name, tagged) in &file.tags {
        TagName::parse(name).ok_or_else(|| format!("the name of the tag {name:?} is invalid"))?;
        if !file.versions.iter().any(|version| version.id == *tagged) {
            return Err(format!("the tag {name} names a version that the session does not list"));
        }
    }
    let mut paths = Vec::new();
    for version in &file.versions {
        let maker = version.session.as_deref();
        maker
            .map_or(Some(()), |id| SessionId::parse(id).map(drop))
            .ok_or("the id of a version's session is invalid")?;
        VersionId::parse(&version.id).ok_or("the id of a version is invalid")?;
        let Some(path) = object(folder, &version.id).filter(|_| version.kept && version.bytes > 0) else { continue };
        let source = from.join(SNAPSHOTS).join(format!("{}.tidegate", version.id));
        let bytes = fs::read(&source).map_err(|error| format!("{}: {error}", source.display()))?;
        if bytes.len() as u64 != version.bytes {
            return Err(format!("{} must have {} bytes, found {}", source.display(), version.bytes, bytes.len()));
        }
        check_digest(&bytes).map_err(|error| format!("{}: {error}", source.display()))?;
        if !is_whole(disk, folder, &version.id, version.bytes) {
            write(disk, &path, &bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        paths.push(path);
    }
    Ok(paths)
}

/// Adds a session and its versions; the inner error says why it is left out.
fn add(
    write: &mut Write<'_>,
    file: &SessionFile,
    texts: &[(String, Vec<u8>)],
) -> Result<Result<(), String>, IndexError> {
    if write.tables.session(&file.id)?.is_some() {
        return Ok(Err("the session exists already".to_owned()));
    }
    for version in &file.versions {
        if write.tables.version(&version.id)?.is_some_and(|row| row.owner != file.owner) {
            return Ok(Err(format!("version {} belongs to another owner", version.id)));
        }
    }
    let mut added = BTreeSet::new();
    for version in &file.versions {
        if write.tables.version(&version.id)?.is_none() {
            added.insert(version.id.as_str());
            let row = VersionRow {
                owner: file.owner,
                parent: version.parent.clone(),
                tokens: version.tokens,
                time: version.time,
                label: version.label.clone(),
                kind: version.kind.clone(),
                prompt_tokens: version.prompt_tokens,
                completion_tokens: version.completion_tokens,
                bytes: version.bytes,
                seed: version.seed,
                kept_by: 0,
                known_by: 0,
                origin: version.origin.clone(),
                session: version.session.clone(),
            };
            write.add_version(&version.id, &row)?;
        }
        write.point(&version.id, i64::from(version.kept), 1)?;
    }
    let row = SessionRow {
        owner: file.owner,
        number: 0,
        created: file.created,
        updated: file.updated,
        used: file.used,
        ttl: file.ttl_seconds,
        head: file.version.clone(),
        metadata: file.metadata.clone(),
        forked_from: file.forked_from.clone(),
        next: 0,
        kept: 0,
        known: 0,
        tags: file.tags.clone(),
    };
    let versions: Vec<(&str, bool)> = file.versions.iter().map(|version| (&*version.id, version.kept)).collect();
    write.add_session(&file.id, row, &versions)?;
    for (version, row) in texts {
        if let Err(reason) = write.import_text(file.owner, version, row, added.contains(version.as_str()))? {
            tracing::warn!(session = file.id, reason, "a text is left out, and those that continue it");
        }
    }
    Ok(Ok(()))
}
