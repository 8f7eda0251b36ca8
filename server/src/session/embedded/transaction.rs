//! Changes to the index. Each function leaves rows, counts, orders and totals consistent with each other.
//!
//! Several requests share one transaction, so a function must check everything before it changes anything.

use redb::WriteTransaction;
use serde::Serialize;

use super::changes::{Changes, Recorder};
use super::error::IndexError;
use super::tables::{ReadWrite, Tables, damaged_row};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{Change, SessionRow, VersionRow};

/// An open write transaction.
pub(crate) struct Write<'t> {
    pub(crate) tables: Tables<ReadWrite<'t>>,
    pub(crate) change: Change,
    /// Versions whose snapshots nothing points to any more.
    pub(crate) freed: Vec<String>,
    recorder: Recorder,
}

fn bytes<T: Serialize>(row: &T) -> Result<Vec<u8>, IndexError> {
    serde_json::to_vec(row).map_err(|error| damaged_row(error.to_string()))
}

impl<'t> Write<'t> {
    pub(super) fn new(transaction: &'t WriteTransaction) -> Result<Self, IndexError> {
        let recorder = Recorder::default();
        let tables = Tables::writing(transaction, &recorder)?;
        Ok(Self { tables, change: Change::default(), freed: Vec::new(), recorder })
    }

    /// The rows changed so far, for the journal.
    pub(super) fn take_changes(&self) -> Changes {
        self.recorder.take()
    }

    // ---- Totals

    fn add(&mut self, name: &str, by: i64) -> Result<(), IndexError> {
        let sum = self.tables.total(name)?.saturating_add_signed(by);
        self.tables.totals.insert(name, sum)?;
        Ok(())
    }

    fn add_owner(&mut self, owner: Owner, bytes: i64, sessions: i64) -> Result<(), IndexError> {
        let (had, of) = self.tables.owner(owner)?;
        let totals = (had.saturating_add_signed(bytes), of.saturating_add_signed(sessions));
        if totals == (0, 0) {
            self.tables.owners.remove(&owner.0)?;
        } else {
            self.tables.owners.insert(&owner.0, totals)?;
        }
        *self.change.owners.entry(owner).or_default() += bytes;
        Ok(())
    }

    fn add_live(&mut self, owner: Owner, bytes: i64, versions: i64) -> Result<(), IndexError> {
        self.add("live", bytes)?;
        self.add("versions", versions)?;
        self.change.live += bytes;
        self.change.versions += versions;
        self.add_owner(owner, bytes, 0)
    }

    fn add_sessions(&mut self, owner: Owner, by: i64) -> Result<(), IndexError> {
        self.add("sessions", by)?;
        self.change.sessions += by;
        self.add_owner(owner, 0, by)
    }

    fn add_garbage(&mut self, bytes: i64) -> Result<(), IndexError> {
        self.add("garbage", bytes)?;
        self.change.garbage += bytes;
        Ok(())
    }

    /// The next number in the order of creation.
    pub(crate) fn number(&mut self) -> Result<u64, IndexError> {
        let number = self.tables.total("number")?;
        self.tables.totals.insert("number", number + 1)?;
        Ok(number)
    }

    // ---- Versions

    /// Inserts a version that nothing points to yet.
    pub(crate) fn add_version(&mut self, id: &str, row: &VersionRow) -> Result<(), IndexError> {
        self.tables.versions.insert(id, &*bytes(row)?)?;
        Ok(())
    }

    /// Changes the number of holders that keep a version and that list it. A version that none keeps becomes garbage; one
    /// that none lists is removed.
    pub(crate) fn point(&mut self, id: &str, kept_by: i64, known_by: i64) -> Result<(), IndexError> {
        let mut row = self.tables.require_version(id)?;
        let (owner, size) = (row.owner, row.bytes as i64);
        let was_kept = row.kept_by > 0;
        row.kept_by = row.kept_by.saturating_add_signed(kept_by);
        row.known_by = row.known_by.saturating_add_signed(known_by);
        match (was_kept, row.kept_by > 0) {
            (false, true) => self.add_live(owner, size, 1)?,
            (true, false) => {
                self.add_live(owner, -size, -1)?;
                if size > 0 {
                    self.tables.garbage.insert(id, row.bytes)?;
                    self.add_garbage(size)?;
                }
                self.freed.push(id.to_owned());
            }
            _ => {}
        }
        if row.known_by == 0 {
            self.tables.versions.remove(id)?;
            self.release_text(id)?;
        } else {
            self.add_version(id, &row)?;
        }
        Ok(())
    }

    /// Records that garbage objects are removed.
    pub(crate) fn remove_garbage(&mut self, ids: &[String]) -> Result<(), IndexError> {
        for id in ids {
            let gone = self.tables.garbage.remove(&**id)?.map(|bytes| bytes.value());
            self.add_garbage(-(gone.unwrap_or(0) as i64))?;
        }
        Ok(())
    }

    // ---- Sessions

    /// Writes a session's row and its places in the orders. `old` is the existing row.
    pub(crate) fn put_session(
        &mut self,
        id: &str,
        old: Option<&SessionRow>,
        new: &SessionRow,
    ) -> Result<(), IndexError> {
        if let Some(old) = old {
            self.remove_order(id, old)?;
        }
        if let Some(ends) = new.ends(0) {
            self.tables.ends.insert((ends, id), ())?;
        }
        self.add_session_droppable(id, new)?;
        self.tables.sessions.insert(id, &*bytes(new)?)?;
        Ok(())
    }

    fn remove_order(&mut self, id: &str, row: &SessionRow) -> Result<(), IndexError> {
        if let Some(ends) = row.ends(0) {
            self.tables.ends.remove((ends, id))?;
        }
        self.remove_session_droppable(id, row)
    }

    /// Refuses if `more` sessions would exceed the owner's quota.
    pub(crate) fn check_session_quota(&self, owner: Owner, more: usize, bound: usize) -> Result<(), IndexError> {
        let found = self.tables.owner(owner)?.1 + more as u64;
        let quota = || StoreError::Quota { quota: "sessions", bound: bound as u64, found };
        if found > bound as u64 { Err(IndexError::Refused(quota())) } else { Ok(()) }
    }

    /// Inserts a session with these versions, oldest first; the flag says whether it keeps the snapshot. `row` names the
    /// head.
    pub(crate) fn add_session(
        &mut self,
        id: &str,
        mut row: SessionRow,
        versions: &[(&str, bool)],
    ) -> Result<SessionRow, IndexError> {
        row.number = self.number()?;
        for (position, (version, kept)) in (0..).zip(versions) {
            let table = if *kept { &mut self.tables.kept } else { &mut self.tables.known };
            table.insert((id, position), *version)?;
        }
        row.next = versions.len() as u64;
        row.kept = versions.iter().filter(|(_, kept)| *kept).count() as u64;
        row.known = row.next - row.kept;
        self.tables.created.insert((&row.owner.0, row.number), id)?;
        self.add_sessions(row.owner, 1)?;
        self.put_session(id, None, &row)?;
        Ok(row)
    }

    pub(crate) fn remove_session(&mut self, id: &str, row: &SessionRow) -> Result<(), IndexError> {
        for entry in self.tables.lineage(id)? {
            let table = if entry.kept { &mut self.tables.kept } else { &mut self.tables.known };
            table.remove((id, entry.position))?;
            self.point(&entry.version, -i64::from(entry.kept), -1)?;
        }
        self.remove_order(id, row)?;
        self.tables.created.remove((&row.owner.0, row.number))?;
        self.tables.sessions.remove(id)?;
        self.add_sessions(row.owner, -1)
    }
}
