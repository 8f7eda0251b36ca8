//! Lists the contents of an index or a journal, read without a server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use redb::{ReadableDatabase, Value};

use super::changes::{RowKey, TEXTS};
use super::error::IndexError;
use super::file::{Failed, PANICKED, connect};
use super::place::{Lock, Place};
use super::record;
use super::recovery::create_tables;
use super::tables::{KEPT, KNOWN, REBUILT, RESPONSES, SESSIONS, TEXT_REFS, Tables, VERSIONS, parse};
use crate::session::disk::SystemDisk;
use crate::session::error::StoreError;
use crate::session::index::TextRow;
use crate::session::index::{LineageEntry, SessionRow, VersionRow};

/// Sessions, versions and responses by id.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) sessions: BTreeMap<String, SessionRow>,
    pub(crate) versions: BTreeMap<String, VersionRow>,
    /// The ids of versions whose rows cannot be read.
    unreadable: BTreeSet<String>,
    /// The versions of each session, oldest first.
    pub(crate) lineages: BTreeMap<String, Vec<LineageEntry>>,
    /// The version of each stored response.
    pub(crate) responses: BTreeMap<String, String>,
    /// The rows of texts, by version.
    pub(crate) texts: BTreeMap<String, Vec<u8>>,
    /// The number of references to each text.
    pub(crate) text_refs: BTreeMap<String, u64>,
    /// What is wrong with the index, the journal and their rows.
    pub(crate) problems: Vec<String>,
    /// What is unusual but not a problem.
    pub(crate) notes: Vec<String>,
    /// Keeps servers from using the folder.
    lock: Option<Lock>,
}

/// Reads a folder's index, or its journal if the index is damaged, and changes neither. Refuses if a server uses the
/// folder.
pub(crate) fn inspect(folder: &Path) -> Result<Listing, StoreError> {
    let place = Place::new(Arc::new(SystemDisk), folder);
    let lock = place.lock_existing()?;
    let file = place.journal();
    let (mut problems, mut notes) = (Vec::new(), Vec::new());
    let journal =
        record::read(&*place.disk, &file, None, record::Rows::Whole).map_err(|error| error.into_store_error(&file))?;
    // A crash can also leave this; the next start of the server removes it.
    if let Some(journal) = journal.as_ref().filter(|journal| journal.rest > 0) {
        problems.push(format!("{}: its last {} bytes are not a whole transaction", file.display(), journal.rest));
    }
    let found = read_index(&place)?;
    if journal.is_none() {
        if file.exists() {
            problems.push(format!("{}: the journal is damaged", file.display()));
        } else if found.as_ref().is_ok_and(|found| !found.has_position) {
            notes.push(format!(
                "{}: an earlier version of the server wrote it, without a journal; the next start of the server adds one",
                place.path.display()
            ));
        } else {
            problems.push(format!("{}: the journal is missing", file.display()));
        }
    }
    let rows = match found {
        Ok(found) => {
            if found.is_converted {
                notes.push(format!(
                    "{}: an earlier version of the server wrote it; a converted copy was checked, and the next start of \
                     the server converts it",
                    place.path.display()
                ));
            }
            // The journal of an earlier version lacks the tables that the conversion makes from others.
            let same = |(key, _): &(&RowKey, &Vec<u8>)| !found.is_converted || !REBUILT.contains(&key.0);
            if journal.is_some_and(|journal| !journal.rows.iter().filter(same).eq(found.rows.iter().filter(same))) {
                problems.push(format!("{}: index and journal differ", folder.display()));
            }
            found.rows
        }
        Err(reason) => {
            problems.push(format!("{}: {reason}", place.path.display()));
            let reason = format!("{reason}, and there is no journal to rebuild it from");
            journal.ok_or_else(|| place.refusal(reason))?.rows
        }
    };
    let mut listing = Listing::new(rows);
    problems.append(&mut listing.problems);
    (listing.problems, listing.notes, listing.lock) = (problems, notes, Some(lock));
    Ok(listing)
}

type Rows = BTreeMap<RowKey, Vec<u8>>;

/// The contents of an index.
struct Found {
    rows: Rows,
    /// Whether an earlier version of the server wrote the index, so that tables were added.
    is_converted: bool,
    /// Whether the index states its position in the journal.
    has_position: bool,
}

/// Returns the contents of an index, or what is wrong with it. Reads a copy, because opening can repair and convert the
/// file.
fn read_index(place: &Place) -> Result<Result<Found, String>, StoreError> {
    let failed = |error: std::io::Error| StoreError::from_io("reading the index failed", &error);
    if !place.path.try_exists().map_err(failed)? {
        return Ok(Err("it is missing".to_owned()));
    }
    let copy = Place { path: place.path.with_extension("check"), ..place.clone() };
    fs::copy(&place.path, &copy.path).map_err(failed)?;
    let found = catch_unwind(AssertUnwindSafe(|| read_copy(&copy)));
    fs::remove_file(&copy.path).map_err(failed)?;
    match found {
        Ok(Ok(found)) => Ok(Ok(found)),
        // A later version of the server wrote the index.
        Ok(Err(Failed::Store(StoreError::Index { reason, .. }))) => Err(place.refusal(reason)),
        Ok(Err(failed)) => Ok(Err(failed.reason())),
        Err(_) => Ok(Err(PANICKED.to_owned())),
    }
}

fn read_copy(copy: &Place) -> Result<Found, Failed> {
    let mut database = connect(copy)?;
    database.check_integrity().map_err(|error| Failed::Damaged(error.to_string()))?;
    let is_converted = create_tables(&database)?;
    let read = || -> Result<_, IndexError> {
        let tables = Tables::reading(&database.begin_read()?)?;
        Ok((tables.rows()?, tables.journal_position()?.is_some()))
    };
    let (rows, has_position) = read()?;
    Ok(Found { rows, is_converted, has_position })
}

impl Listing {
    pub(crate) fn new(rows: Rows) -> Self {
        let mut listing = Self::default();
        for ((table, key), value) in rows {
            let name = || String::from_utf8_lossy(&key).into_owned();
            match table {
                SESSIONS => match parse::<SessionRow>(&value) {
                    Ok(row) => drop(listing.sessions.insert(name(), row)),
                    Err(_) => listing.problems.push(format!("session {}: its row cannot be read", name())),
                },
                VERSIONS => {
                    if let Ok(row) = parse::<VersionRow>(&value) {
                        listing.versions.insert(name(), row);
                    } else {
                        listing.problems.push(format!("version {}: its row cannot be read", name()));
                        listing.unreadable.insert(name());
                    }
                }
                KEPT | KNOWN => {
                    let (session, position) = <(&str, u64)>::from_bytes(&key);
                    let version = String::from_utf8_lossy(&value).into_owned();
                    let entry = LineageEntry { position, version, kept: table == KEPT };
                    listing.lineages.entry(session.to_owned()).or_default().push(entry);
                }
                RESPONSES => {
                    let (_, version, ..) = <(&[u8; 16], &str, u64, &[u8])>::from_bytes(&value);
                    listing.responses.insert(name(), version.to_owned());
                }
                TEXTS => drop(listing.texts.insert(name(), value)),
                TEXT_REFS => {
                    let (_, references, _) = <(&[u8; 16], u64, u64)>::from_bytes(&value);
                    listing.text_refs.insert(name(), references);
                }
                _ => {}
            }
        }
        for lineage in listing.lineages.values_mut() {
            lineage.sort_by_key(|entry| entry.position);
        }
        listing
    }

    /// Returns what is wrong with the texts.
    pub(crate) fn text_problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut references: BTreeMap<&str, u64> = BTreeMap::new();
        for (id, row) in &self.texts {
            let listed = self.versions.contains_key(id) || self.unreadable.contains(id);
            *references.entry(id).or_default() += u64::from(listed);
            match TextRow::parse(row).and_then(|row| row.added().map(|_| row.parent)) {
                Ok(Some(parent)) if !self.texts.contains_key(parent) => {
                    problems
                        .push(format!("version {id}: its text continues that of version {parent}, which is missing"));
                }
                Ok(Some(parent)) => *references.entry(parent).or_default() += 1,
                Ok(None) => {}
                Err(_) => problems.push(format!("version {id}: its text cannot be read")),
            }
        }
        let known: BTreeMap<&str, u64> = self.text_refs.iter().map(|(id, count)| (id.as_str(), *count)).collect();
        let wrong = references.keys().chain(known.keys()).filter(|id| references.get(**id) != known.get(**id));
        let wrong: BTreeSet<_> = wrong.collect();
        problems.extend(
            wrong.into_iter().map(|id| format!("version {id}: the references to its text are counted wrongly")),
        );
        problems
    }

    /// Returns the versions whose objects must exist.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&String, &VersionRow)> {
        self.versions.iter().filter(|(_, row)| row.kept_by > 0 && row.bytes > 0)
    }
}
