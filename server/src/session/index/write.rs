//! What a transaction does to the index: each function leaves rows, counts, orders and sums in agreement.
//!
//! Several callers share one transaction, so a function that refuses has changed nothing before.

use std::sync::Arc;

use redb::ReadableTable;
use serde::Serialize;

use super::Fault;
use super::ledger::{Change, Reservation};
use super::rows::{SessionRow, VersionRow};
use super::tables::{Tables, Writing, broken};
use crate::session::{Owner, StoreError};

/// An open transaction.
pub(crate) struct Write<'t> {
    pub(crate) tables: Tables<Writing<'t>>,
    pub(crate) change: Change,
    /// Versions whose snapshots nothing points to any more.
    pub(crate) freed: Vec<String>,
}

fn bytes<T: Serialize>(row: &T) -> Result<Vec<u8>, Fault> {
    serde_json::to_vec(row).map_err(|error| broken(error.to_string()))
}

impl<'t> Write<'t> {
    pub(crate) fn new(tables: Tables<Writing<'t>>) -> Self {
        Self { tables, change: Change::default(), freed: Vec::new() }
    }

    /// The room that was promised for a version becomes the version's with this transaction.
    pub(crate) fn settle(&mut self, reservation: Option<&Arc<Reservation>>) {
        self.change.settled.extend(reservation.cloned());
    }

    // ---- Sums

    fn add(&mut self, name: &str, by: i64) -> Result<(), Fault> {
        let sum = self.tables.total(name)?.saturating_add_signed(by);
        self.tables.totals.insert(name, sum)?;
        Ok(())
    }

    fn add_owner(&mut self, owner: Owner, bytes: i64, sessions: i64) -> Result<(), Fault> {
        let (had, of) = self.tables.owner(owner)?;
        let sums = (had.saturating_add_signed(bytes), of.saturating_add_signed(sessions));
        if sums == (0, 0) {
            self.tables.owners.remove(&owner.0)?;
        } else {
            self.tables.owners.insert(&owner.0, sums)?;
        }
        *self.change.owners.entry(owner).or_default() += bytes;
        Ok(())
    }

    fn add_live(&mut self, owner: Owner, bytes: i64, versions: i64) -> Result<(), Fault> {
        self.add("live", bytes)?;
        self.add("versions", versions)?;
        self.change.live += bytes;
        self.change.versions += versions;
        self.add_owner(owner, bytes, 0)
    }

    fn add_sessions(&mut self, owner: Owner, by: i64) -> Result<(), Fault> {
        self.add("sessions", by)?;
        self.change.sessions += by;
        self.add_owner(owner, 0, by)
    }

    fn add_garbage(&mut self, bytes: i64) -> Result<(), Fault> {
        self.add("garbage", bytes)?;
        self.change.garbage += bytes;
        Ok(())
    }

    /// The next number in the order of creation.
    pub(crate) fn number(&mut self) -> Result<u64, Fault> {
        let number = self.tables.total("number")?;
        self.tables.totals.insert("number", number + 1)?;
        Ok(number)
    }

    // ---- Versions

    /// Writes down a version that nothing points to yet.
    pub(crate) fn add_version(&mut self, id: &str, row: &VersionRow) -> Result<(), Fault> {
        self.tables.versions.insert(id, &*bytes(row)?)?;
        Ok(())
    }

    /// Changes how many keep a version and how many know it. What nobody keeps becomes garbage, what nobody knows
    /// is forgotten.
    pub(crate) fn point(&mut self, id: &str, kept_by: i64, known_by: i64) -> Result<(), Fault> {
        let mut row = self.tables.known_version(id)?;
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
        } else {
            self.add_version(id, &row)?;
        }
        Ok(())
    }

    /// The objects are gone.
    pub(crate) fn collected(&mut self, ids: &[String]) -> Result<(), Fault> {
        for id in ids {
            let gone = self.tables.garbage.remove(&**id)?.map(|bytes| bytes.value());
            self.add_garbage(-(gone.unwrap_or(0) as i64))?;
        }
        Ok(())
    }

    // ---- Sessions

    /// Writes a session's row and what is ordered by it; `old` is the row that is there.
    pub(crate) fn put_session(&mut self, id: &str, old: Option<&SessionRow>, new: &SessionRow) -> Result<(), Fault> {
        if let Some(old) = old {
            self.forget_order(id, old)?;
        }
        if let Some(ends) = new.ends(0) {
            self.tables.ends.insert((ends, id), ())?;
        }
        if new.kept > 1 {
            self.add_droppable(new.owner, new.used, id)?;
        }
        self.tables.sessions.insert(id, &*bytes(new)?)?;
        Ok(())
    }

    fn forget_order(&mut self, id: &str, row: &SessionRow) -> Result<(), Fault> {
        if let Some(ends) = row.ends(0) {
            self.tables.ends.remove((ends, id))?;
        }
        if row.kept > 1 {
            self.forget_droppable(row.owner, row.used, id)?;
        }
        Ok(())
    }

    /// Refuses where `more` sessions would be more than an owner may have.
    pub(crate) fn room_for_sessions(&self, owner: Owner, more: usize, bound: usize) -> Result<(), Fault> {
        let found = self.tables.owner(owner)?.1 + more as u64;
        let quota = || StoreError::Quota { quota: "sessions", bound: bound as u64, found };
        if found > bound as u64 { Err(Fault::Refused(quota())) } else { Ok(()) }
    }

    /// A new session with these versions, oldest first, each kept or only remembered; its row says the head.
    pub(crate) fn add_session(
        &mut self,
        id: &str,
        mut row: SessionRow,
        places: &[(&str, bool)],
    ) -> Result<SessionRow, Fault> {
        row.number = self.number()?;
        for (at, (version, kept)) in (0..).zip(places) {
            let table = if *kept { &mut self.tables.kept } else { &mut self.tables.known };
            table.insert((id, at), *version)?;
        }
        row.next = places.len() as u64;
        row.kept = places.iter().filter(|(_, kept)| *kept).count() as u64;
        row.known = row.next - row.kept;
        self.tables.created.insert((&row.owner.0, row.number), id)?;
        self.add_sessions(row.owner, 1)?;
        self.put_session(id, None, &row)?;
        Ok(row)
    }

    pub(crate) fn remove_session(&mut self, id: &str, row: &SessionRow) -> Result<(), Fault> {
        for place in self.tables.lineage(id)? {
            let table = if place.kept { &mut self.tables.kept } else { &mut self.tables.known };
            table.remove((id, place.at))?;
            self.point(&place.version, -i64::from(place.kept), -1)?;
        }
        self.forget_order(id, row)?;
        self.tables.created.remove((&row.owner.0, row.number))?;
        self.tables.sessions.remove(id)?;
        self.add_sessions(row.owner, -1)
    }

    /// The session remembers a version that it kept, and forgets the oldest beyond `lineage` that it remembers.
    pub(crate) fn drop_version(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        at: u64,
        lineage: usize,
    ) -> Result<(), Fault> {
        let Some(version) = self.tables.kept.remove((id, at))?.map(|version| version.value().to_owned()) else {
            return Err(broken(format!("session {id} keeps nothing at {at}")));
        };
        self.tables.known.insert((id, at), &*version)?;
        row.kept -= 1;
        row.known += 1;
        self.point(&version, -1, 0)?;
        while row.known > lineage as u64 {
            let oldest = match self.tables.known.range((id, 0)..=(id, u64::MAX))?.next().transpose()? {
                Some((key, version)) => (key.value().1, version.value().to_owned()),
                None => return Err(broken(format!("session {id} remembers less than its row says"))),
            };
            self.tables.known.remove((id, oldest.0))?;
            row.known -= 1;
            self.point(&oldest.1, 0, -1)?;
        }
        Ok(())
    }

    /// The session keeps a version more, which becomes its head; the oldest others beyond `keep` are dropped.
    pub(crate) fn push_head(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        keep: usize,
        lineage: usize,
    ) -> Result<(), Fault> {
        self.tables.kept.insert((id, row.next), version)?;
        self.point(version, 1, 1)?;
        version.clone_into(&mut row.head);
        row.next += 1;
        row.kept += 1;
        while row.kept > keep as u64 {
            let mut oldest = None;
            for entry in self.tables.kept.range((id, 0)..=(id, u64::MAX))? {
                let (key, found) = entry?;
                if found.value() != row.head {
                    oldest = Some(key.value().1);
                    break;
                }
            }
            let Some(oldest) = oldest else { break };
            self.drop_version(id, row, oldest, lineage)?;
        }
        Ok(())
    }
}
