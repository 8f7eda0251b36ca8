//! Changes to the index. Each function keeps rows, counts, orders and totals consistent.

use std::collections::HashMap;

use redb::{ReadableTable, WriteTransaction};
use serde::Serialize;

use super::changes::{Changes, Recorder};
use super::error::IndexError;
use super::tables::{ReadWrite, Tables, damaged_row};
use crate::session::id::{Owner, SessionId};
use crate::session::index::{
    Change, LineageEntry, NewReceipt, NewVersion, ResponseRow, SessionRow, Transaction, VersionRow,
};

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

    /// Returns the rows changed so far, for the journal.
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

    // ---- Versions

    /// Inserts a version that nothing points to yet.
    pub(crate) fn add_version(&mut self, id: &str, row: &VersionRow) -> Result<(), IndexError> {
        self.tables.versions.insert(id, &*bytes(row)?)?;
        Ok(())
    }

    /// Records that garbage objects have been removed.
    pub(crate) fn remove_garbage(&mut self, ids: &[String]) -> Result<(), IndexError> {
        for id in ids {
            let gone = self.tables.garbage.remove(&**id)?.map(|bytes| bytes.value());
            self.add_garbage(-(gone.unwrap_or(0) as i64))?;
        }
        Ok(())
    }

    // ---- Sessions

    /// Records the last uses of sessions.
    pub(super) fn record_uses(&mut self, uses: &HashMap<SessionId, u64>) -> Result<(), IndexError> {
        for (id, used) in uses {
            let old = match self.tables.session(id.as_str()) {
                Err(IndexError::Row(reason)) => {
                    tracing::error!(session = %id, reason, "a damaged row: the session's use is not recorded");
                    continue;
                }
                found => found?,
            };
            if let Some(old) = old {
                let mut row = old.clone();
                row.used = row.used.max(*used);
                self.put_session(id.as_str(), Some(&old), Some(&row))?;
            }
        }
        Ok(())
    }
}

impl Transaction for Write<'_> {
    type Error = IndexError;

    fn damaged(reason: String) -> IndexError {
        damaged_row(reason)
    }

    // ---- Reading

    fn find_session(&self, id: &str) -> Result<Option<SessionRow>, IndexError> {
        self.tables.session(id)
    }

    fn find_version(&self, id: &str) -> Result<Option<VersionRow>, IndexError> {
        self.tables.version(id)
    }

    fn count_sessions(&self, owner: Owner) -> Result<u64, IndexError> {
        Ok(self.tables.owner(owner)?.1)
    }

    fn lineage(&self, session: &str) -> Result<Vec<LineageEntry>, IndexError> {
        self.tables.lineage(session)
    }

    fn oldest(&self, session: &str, kept: bool, limit: usize) -> Result<Vec<(u64, String)>, IndexError> {
        let table = if kept { &self.tables.kept } else { &self.tables.known };
        let entries = table.range((session, 0)..=(session, u64::MAX))?.take(limit);
        let found = entries.map(|entry| entry.map(|(key, version)| (key.value().1, version.value().to_owned())));
        Ok(found.collect::<Result<_, _>>()?)
    }

    fn position(&self, session: &str, version: &str) -> Result<Option<(u64, bool)>, IndexError> {
        self.tables.position(session, version)
    }

    fn receipt_ends(&self, owner: Owner, key: &str) -> Result<Option<u64>, IndexError> {
        Ok(self.tables.receipt(owner, key)?.map(|(ends, _)| ends))
    }

    // ---- Changing

    fn number(&mut self) -> Result<u64, IndexError> {
        let number = self.tables.total("number")?;
        self.tables.totals.insert("number", number + 1)?;
        Ok(number)
    }

    /// Also updates the session's entries in the orders.
    fn put_session(&mut self, id: &str, old: Option<&SessionRow>, new: Option<&SessionRow>) -> Result<(), IndexError> {
        if let Some(old) = old {
            if let Some(ends) = old.ends(0) {
                self.tables.ends.remove((ends, id))?;
            }
            self.remove_session_droppable(id, old)?;
        }
        if let Some(new) = new {
            if let Some(ends) = new.ends(0) {
                self.tables.ends.insert((ends, id), ())?;
            }
            self.add_session_droppable(id, new)?;
            self.tables.sessions.insert(id, &*bytes(new)?)?;
        }
        match (old, new) {
            (None, Some(new)) => {
                self.tables.created.insert((&new.owner.0, new.number), id)?;
                self.add_sessions(new.owner, 1)
            }
            (Some(old), None) => {
                self.tables.sessions.remove(id)?;
                self.tables.created.remove((&old.owner.0, old.number))?;
                self.add_sessions(old.owner, -1)
            }
            _ => Ok(()),
        }
    }

    fn put_entry(&mut self, session: &str, position: u64, version: &str, kept: bool) -> Result<(), IndexError> {
        let table = if kept { &mut self.tables.kept } else { &mut self.tables.known };
        table.insert((session, position), version)?;
        Ok(())
    }

    fn remove_entry(&mut self, session: &str, position: u64, kept: bool) -> Result<Option<String>, IndexError> {
        let table = if kept { &mut self.tables.kept } else { &mut self.tables.known };
        Ok(table.remove((session, position))?.map(|version| version.value().to_owned()))
    }

    fn add_new(&mut self, version: &NewVersion) -> Result<(), IndexError> {
        let NewVersion { id, row, text, reserved } = version;
        self.add_version(id.as_str(), row)?;
        if let Some(text) = text {
            self.add_text(row.owner, id.as_str(), row.parent.as_deref(), text)?;
        }
        self.change.fulfilled.extend(reserved.iter().cloned());
        Ok(())
    }

    fn put_version(&mut self, id: &str, row: &VersionRow) -> Result<(), IndexError> {
        self.add_version(id, row)
    }

    fn point(&mut self, id: &str, kept_by: i64, known_by: i64) -> Result<(), IndexError> {
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

    fn put_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), IndexError> {
        Write::put_response(self, id, row)
    }

    fn put_receipt(&mut self, owner: Owner, receipt: &NewReceipt<Vec<u8>>) -> Result<(), IndexError> {
        Write::put_receipt(self, owner, receipt)
    }
}
