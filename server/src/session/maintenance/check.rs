//! Checks and repairs a store's folder.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::files::{OBJECTS, failed, is_whole, object};
use crate::session::disk::SystemDisk;
use crate::session::embedded::{Listing, OpenIndex, Place, Writer, inspect};
use crate::session::error::StoreError;
use crate::session::format::check_digest;
use crate::session::index::Transaction;

/// Number of texts removed in one transaction.
const BATCH: usize = 500;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Number of sessions.
    pub sessions: usize,
    /// Number of snapshots.
    pub snapshots: usize,
    /// What is wrong, one line per problem.
    pub problems: Vec<String>,
    /// What is unusual but not a problem.
    pub notes: Vec<String>,
    /// What was repaired.
    pub repaired: Vec<String>,
}

/// Checks the index, the journal and every snapshot of a store that no server uses. Changes nothing.
///
/// # Errors
/// A server uses the folder, it cannot be read, or neither its index nor its journal can be read.
pub fn check(folder: &Path) -> Result<Report, StoreError> {
    let listing = inspect(folder)?;
    let bad = bad_objects(folder, &listing);
    let mut problems = listing.problems.clone();
    for (id, row) in &listing.sessions {
        let lineage = listing.lineages.get(id).map_or(&[][..], Vec::as_slice);
        if !lineage.iter().any(|entry| entry.kept && entry.version == row.head) {
            problems.push(format!("session {id}: its version {} is not among those that it keeps", row.head));
        }
        for (tag, version) in &row.tags {
            if !lineage.iter().any(|entry| entry.version == *version) {
                problems.push(format!("session {id}: the tag {tag} names version {version}, which it does not list"));
            }
        }
        for entry in lineage {
            let head = if entry.version == row.head { " (its current version)" } else { "" };
            if !listing.versions.contains_key(&entry.version) {
                problems.push(format!("session {id}: version {}{head} has no row", entry.version));
            } else if let Some(reason) = bad.get(&entry.version).filter(|_| entry.kept) {
                problems.push(format!("session {id}: the snapshot of version {}{head} {reason}", entry.version));
            }
        }
    }
    for (id, version) in &listing.responses {
        if let Some(reason) = bad.get(version) {
            problems.push(format!("response {id}: its snapshot {reason}"));
        }
    }
    problems.extend(listing.text_problems());
    let (sessions, snapshots) = (listing.sessions.len(), listing.objects().count());
    let unnamed = unnamed_objects(folder, &listing)?;
    let mut notes = listing.notes;
    notes.extend(unnamed_notes(&unnamed, "the server removes it after its next start"));
    Ok(Report { sessions, snapshots, problems, notes, repaired: Vec::new() })
}

/// Returns the objects that no version needs.
fn unnamed_objects(folder: &Path, listing: &Listing) -> Result<BTreeSet<String>, StoreError> {
    let objects = folder.join(OBJECTS);
    let mut unnamed = BTreeSet::new();
    if objects.exists() {
        for shard in fs::read_dir(&objects).map_err(failed(&objects))? {
            let shard = shard.map_err(failed(&objects))?.path();
            for file in fs::read_dir(&shard).map_err(failed(&shard))? {
                unnamed.insert(file.map_err(failed(&shard))?.file_name().to_string_lossy().into_owned());
            }
        }
    }
    for (id, _) in listing.objects() {
        unnamed.remove(id);
    }
    Ok(unnamed)
}

/// Maximum number of lines about objects that no version needs.
const NAMED: usize = 100;

/// Returns the lines about objects that no version needs.
pub(super) fn unnamed_notes(unnamed: &BTreeSet<String>, why: &str) -> Vec<String> {
    let named = unnamed.iter().take(NAMED).map(|id| format!("no version needs the object {id}: {why}"));
    let more = unnamed.len().saturating_sub(NAMED);
    named.chain((more > 0).then(|| format!("no version needs {more} other objects"))).collect()
}

/// Returns the objects that are missing or damaged, each with what is wrong.
fn bad_objects(folder: &Path, listing: &Listing) -> BTreeMap<String, String> {
    let objects: Vec<_> = listing.objects().collect();
    if !folder.join(OBJECTS).exists() {
        // With `--store`, the snapshots are elsewhere.
        return BTreeMap::new();
    }
    let check = |id: &str, bytes: u64| -> Result<(), String> {
        let path = object(folder, id).ok_or("has an invalid id")?;
        let found = fs::read(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => "is missing".to_owned(),
            _ => format!("cannot be read: {error}"),
        })?;
        if found.len() as u64 != bytes {
            return Err(format!("must have {bytes} bytes, found {}", found.len()));
        }
        check_digest(&found).map_err(|error| format!("is damaged: {error}"))
    };
    let bad = objects.par_iter().filter_map(|(id, row)| Some(((*id).clone(), check(id, row.bytes).err()?)));
    bad.collect()
}

/// Rebuilds a damaged index or journal from the other. Rewinds a session whose current snapshot is missing or damaged
/// to its newest readable version. Removes texts that cannot be read, and the texts that continue them.
///
/// # Errors
/// A server uses the folder, it cannot be read or written, or neither its index nor its journal can be read.
pub async fn repair(folder: &Path) -> Result<Report, StoreError> {
    let before = check(folder)?;
    // With `--store`, the snapshots are elsewhere.
    let elsewhere = !folder.join(OBJECTS).exists();
    let whole = |id: &str, bytes: u64| elsewhere || is_whole(&SystemDisk, folder, id, bytes);
    let place = Place::new(Arc::new(SystemDisk), folder);
    let lock = place.lock()?;
    let index = Arc::new(OpenIndex::open(place, lock, true, &whole)?);
    let writer = Writer::start(Arc::clone(&index), true, Box::new(|_| {}), Box::new(|| Ok(())))?;
    let listing = inspect_open(&index)?;
    let bad = bad_objects(folder, &listing);
    // A version without a row cannot be read, even if its object can.
    let readable = |version: &String| listing.versions.contains_key(version) && !bad.contains_key(version);
    let mut repaired = Vec::new();
    for (id, row) in &listing.sessions {
        if readable(&row.head) {
            continue;
        }
        let lineage = listing.lineages.get(id).map_or(&[][..], Vec::as_slice);
        let Some(entry) = lineage.iter().rev().find(|entry| entry.kept && readable(&entry.version)) else { continue };
        let (name, head) = (id.clone(), entry.version.clone());
        let moved = writer.run(move |write| {
            if let Some(old) = write.tables.session(&name)? {
                let mut row = old.clone();
                row.head.clone_from(&head);
                write.put_session(&name, Some(&old), Some(&row))?;
            }
            Ok(())
        });
        moved.await?;
        repaired.push(format!("session {id}: rewound from version {} to {}", row.head, entry.version));
    }
    if !listing.text_problems().is_empty() {
        #[expect(clippy::redundant_closure_for_method_calls, reason = "the method's lifetime is not general enough")]
        writer.run(|write| write.recount_texts()).await?;
        while writer.run(|write| write.remove_dead_texts(BATCH)).await? > 0 {}
    }
    writer.stop();
    index.close();
    drop(index);
    let after = check(folder)?;
    for problem in before.problems {
        if !after.problems.contains(&problem) {
            repaired.push(format!("no longer: {problem}"));
        }
    }
    Ok(Report { repaired, ..after })
}

fn inspect_open(index: &OpenIndex) -> Result<Listing, StoreError> {
    index.read(|tables| Ok(Listing::new(tables.rows()?)))
}
