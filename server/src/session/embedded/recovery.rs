//! Opens the index together with its journal. Each can be rebuilt from the other; the newest whole copy prevails.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use redb::{Database, DatabaseError, ReadableDatabase};

use super::error::IndexError;
use super::file::{FORMAT, Failed, NEW, PANICKED, connect, create_file, create_new, damaged, is_damage, read_totals};
use super::journal::Journal;
use super::place::{JOURNAL, Place};
use super::record::{self, Contents, Entry, Position, Rows};
use super::tables::{Tables, VERSIONS, parse};
use super::transaction::Write;
use crate::session::disk::{self, Disk};
use crate::session::error::StoreError;
use crate::session::index::VersionRow;

/// Returns whether an object can be read, given its id and its size in bytes.
pub(super) type WholeObject<'a> = dyn Fn(&str, u64) -> bool + 'a;

/// Opens both files, creating or repairing them if necessary. `is_whole` checks objects that only the journal names.
pub(super) fn open(place: &Place, sync: bool, is_whole: &WholeObject<'_>) -> Result<(Database, Journal), StoreError> {
    let failed = |error: io::Error| StoreError::from_io("opening the index failed", &error);
    if !place.disk.exists(&place.path).map_err(failed)? {
        if place.disk.exists(&place.journal()).map_err(failed)? {
            rebuild(place, "it is missing")?;
        } else {
            create_file(place, sync)?;
        }
    }
    match try_open(place, is_whole) {
        Ok(opened) => Ok(opened),
        Err(Failed::Store(error)) => Err(error),
        Err(Failed::Damaged(reason)) => {
            rebuild(place, &reason)?;
            try_open(place, is_whole).map_err(|failed| failed.into_store_error(place))
        }
    }
}

fn try_open(place: &Place, is_whole: &WholeObject<'_>) -> Result<(Database, Journal), Failed> {
    let work = || {
        let mut database = connect(place)?;
        // Check all pages now: they are not checked when they are read later.
        match database.check_integrity() {
            Ok(true) => {}
            Ok(false) => tracing::warn!(index = %place.path.display(), "the index was repaired"),
            Err(DatabaseError::Storage(redb::StorageError::Io(error))) if !is_damage(&error) => {
                return Err(Failed::Store(StoreError::from_io("checking the index failed", &error)));
            }
            Err(error) => return Err(Failed::Damaged(error.to_string())),
        }
        create_tables(&database)?;
        let journal = reconcile(place, &database, is_whole)?;
        Ok((database, journal))
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Failed::Damaged(PANICKED.to_owned())))
}

/// Creates the tables that a new index or one of an earlier version lacks, and returns whether any were missing. If
/// none were, it writes nothing, because the disk may be full.
pub(super) fn create_tables(database: &Database) -> Result<bool, IndexError> {
    match Tables::reading(&database.begin_read()?) {
        Err(IndexError::Broken(redb::Error::TableDoesNotExist(_))) => {}
        tables => return tables.map(|_| false),
    }
    let transaction = database.begin_write()?;
    let mut write = Write::new(&transaction)?;
    write.rebuild_droppable()?;
    write.rebuild_receipt_bytes()?;
    write.tables.set_format(FORMAT)?;
    drop(write);
    transaction.commit()?;
    Ok(true)
}

/// Makes the index and the journal agree, and opens the journal.
fn reconcile(place: &Place, database: &Database, is_whole: &WholeObject<'_>) -> Result<Journal, IndexError> {
    let (disk, file) = (&*place.disk, place.journal());
    let position = Tables::reading(&database.begin_read()?)?.journal_position()?;
    let contents =
        record::read(disk, &file, position, Rows::Abridged).map_err(|error| error.into_index_error(&file))?;
    let name = file.display();
    let Some(mut contents) = contents else {
        if disk.exists(&file)? {
            let aside = set_aside(disk, &file)?;
            tracing::error!(
                "the journal {name} is damaged; it is now {}, and is rewritten from the index",
                aside.display()
            );
        } else if position.is_some() {
            tracing::warn!("the journal {name} is missing; it is rewritten from the index");
        }
        return rewrite(disk, &file, database, position);
    };
    match (position, contents.after.take()) {
        (Some(position), Some(after)) if !after.is_empty() => {
            replay(&mut contents, database, position, after, is_whole)?;
        }
        (Some(_), Some(_)) if has_rows(database, &contents)? => {}
        (Some(_), Some(_)) => {
            tracing::warn!("the journal {name} has other rows than the index; it is rewritten from the index");
            return rewrite(disk, &file, database, position);
        }
        // Both files contain everything that was acknowledged, so a crash cannot cause this: the files are from
        // different points in time.
        (Some(position), None) if contents.end.sequence > position.sequence => {
            return Err(IndexError::Broken(redb::Error::Corrupted("it is older than its journal".to_owned())));
        }
        (Some(_), None) => {
            tracing::warn!(
                "the journal {name} does not lead to the index: was the folder copied while a server used it? The index is \
                 whole, so the journal is rewritten from it"
            );
            return rewrite(disk, &file, database, position);
        }
        (None, _) if is_empty(database)? && !contents.rows.is_empty() => {
            let whole = record::read(disk, &file, None, Rows::Whole).map_err(|error| error.into_index_error(&file))?;
            fill(database, whole.as_ref().unwrap_or(&contents))?;
            tracing::warn!("the index was empty; it is filled from the journal {name}");
        }
        (None, _) => {
            tracing::warn!("the journal {name} is not of this index; it is rewritten from the index");
            return rewrite(disk, &file, database, position);
        }
    }
    if contents.rest > 0 {
        tracing::info!(bytes = contents.rest, "removed what a crash left at the end of the journal");
    }
    let journal = Journal::open(disk, &file, &contents)?;
    if journal.is_large() { rewrite(disk, &file, database, Some(journal.end())) } else { Ok(journal) }
}

/// Writes a new journal from the index.
pub(super) fn rewrite(
    disk: &dyn Disk,
    file: &Path,
    database: &Database,
    position: Option<Position>,
) -> Result<Journal, IndexError> {
    let position = if let Some(position) = position {
        position
    } else {
        let position = Position { sequence: 0, digest: rand::random() };
        let transaction = database.begin_write()?;
        Write::new(&transaction)?.tables.set_position(position)?;
        transaction.commit()?;
        position
    };
    let tables = Tables::reading(&database.begin_read()?)?;
    Journal::create(disk, file, position, |visit| tables.visit_rows(visit))
}

/// Returns whether the index has exactly the journal's rows.
fn has_rows(database: &Database, contents: &Contents) -> Result<bool, IndexError> {
    let (mut same, mut count) = (true, 0);
    Tables::reading(&database.begin_read()?)?.visit_rows::<IndexError>(&mut |table, key, value| {
        let value = record::abridged(table, value.to_vec());
        same &= contents.rows.get(&(table, key.to_vec())).is_some_and(|row| *row == value);
        count += 1;
        Ok(())
    })?;
    Ok(same && count == contents.rows.len())
}

fn is_empty(database: &Database) -> Result<bool, IndexError> {
    let totals = read_totals(&Tables::reading(&database.begin_read()?)?)?;
    Ok((totals.sessions, totals.versions) == (0, 0))
}

/// Adds the transactions that only the journal has to the index.
fn replay(
    contents: &mut Contents,
    database: &Database,
    position: Position,
    after: Vec<Entry>,
    is_whole: &WholeObject<'_>,
) -> Result<(), IndexError> {
    let transactions = after.len();
    let (mut end, mut applied) = (position, 0);
    let mut transaction = database.begin_write()?;
    let mut write = Write::new(&transaction)?;
    for entry in after {
        let missing = entry.changes.iter().find_map(|((table, key), value)| {
            let row: VersionRow = value.as_deref().filter(|_| *table == VERSIONS).and_then(|row| parse(row).ok())?;
            let id = std::str::from_utf8(key).ok()?;
            // A later transaction may have dropped the version; its object was then removed.
            let last = contents.rows.get(&(*table, key.clone())).and_then(|row| parse::<VersionRow>(row).ok());
            let needed = row.kept_by > 0 && row.bytes > 0 && last.is_some_and(|row| row.kept_by > 0);
            (needed && !is_whole(id, row.bytes)).then(|| id.to_owned())
        });
        if let Some(missing) = missing {
            // Without a sync, the disk may keep the journal but lose the object.
            tracing::warn!(
                version = missing,
                "a snapshot did not reach the disk; {} transactions from there on are undone",
                transactions - applied
            );
            break;
        }
        for ((table, key), value) in &entry.changes {
            write.tables.apply(*table, key, value.as_deref())?;
        }
        (end, contents.length, applied) = (entry.position, entry.end, applied + 1);
    }
    if applied == 0 {
        // The journal is cut where the index's last transaction ends.
        drop(write);
        transaction.abort()?;
        contents.length = contents.before_after;
    } else {
        write.tables.set_position(end)?;
        drop(write);
        transaction.set_quick_repair(true);
        transaction.commit()?;
        tracing::info!(transactions = applied, "replayed what only the journal had");
    }
    contents.end = end;
    Ok(())
}

/// Fills an empty index with the journal's rows.
fn fill(database: &Database, contents: &Contents) -> Result<(), IndexError> {
    let mut transaction = database.begin_write()?;
    let mut write = Write::new(&transaction)?;
    for ((table, key), value) in &contents.rows {
        write.tables.apply(*table, key, Some(value))?;
    }
    write.tables.set_position(contents.end)?;
    write.tables.set_format(FORMAT)?;
    drop(write);
    transaction.set_quick_repair(true);
    Ok(transaction.commit()?)
}

/// Writes a new index from the journal, and renames any damaged one.
fn rebuild(place: &Place, reason: &str) -> Result<(), StoreError> {
    let failed = |error: io::Error| StoreError::from_io("rebuilding the index failed", &error);
    let (disk, file) = (&*place.disk, place.journal());
    let contents = record::read(disk, &file, None, Rows::Whole).map_err(|error| error.into_store_error(&file))?;
    let Some(contents) = contents else { return Err(damaged(place, reason)) };
    tracing::error!("the index {} cannot be used ({reason}); rebuilding it from the journal", place.path.display());
    if contents.rest > 0 {
        // This is done first, because while this copy exists, snapshots that nothing names are kept.
        let aside = free_name(disk, &file);
        disk::read(disk, &file).and_then(|bytes| disk::write(disk, &aside, &bytes)).map_err(failed)?;
        tracing::error!(
            bytes = contents.rest,
            "the end of the journal is damaged as well: what was committed after transaction {} may be lost; snapshots that \
             nothing names are kept as long as {} is there",
            contents.end.sequence,
            aside.display()
        );
    }
    let database = create_new(place)?;
    fill(&database, &contents).map_err(|error| error.to_store_error())?;
    drop(database);
    if disk.exists(&place.path).map_err(failed)? {
        let aside = set_aside(disk, &place.path).map_err(failed)?;
        tracing::warn!("the damaged index is now {}; remove it when you no longer need it", aside.display());
    }
    disk.rename(&place.path.with_extension(NEW), &place.path).and_then(|()| place.sync_folder()).map_err(failed)
}

/// Renames a damaged file, and returns the new name.
fn set_aside(disk: &dyn Disk, path: &Path) -> io::Result<PathBuf> {
    let free = free_name(disk, path);
    disk.rename(path, &free)?;
    Ok(free)
}

/// Returns an unused name for a damaged file.
fn free_name(disk: &dyn Disk, path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut names = (1u32..).map(|number| path.with_file_name(format!("{name}.damaged-{number}")));
    names.find(|name| disk.exists(name).is_ok_and(|exists| !exists)).unwrap_or_else(|| path.with_extension("damaged"))
}

/// Returns whether a damaged index or journal is kept beside the index.
pub(super) fn damaged_is_kept(place: &Place) -> bool {
    let index = place.path.file_name().unwrap_or_default().to_string_lossy();
    let damaged = [&*index, JOURNAL].map(|name| format!("{name}.damaged-"));
    // If the folder cannot be read, assume so: nothing may be removed then.
    let names = place.disk.names(place.folder());
    names.map_or(true, |names| names.iter().any(|name| damaged.iter().any(|damaged| name.starts_with(damaged))))
}
