//! The rows of an index transaction, as the operations on sessions read and change them. Each storage implements the
//! trait on its own rows; `operations.rs` and `branches.rs` decide what changes.

use super::requests::{NewReceipt, NewVersion};
use super::rows::{LineageEntry, ResponseRow, SessionRow, VersionRow};
use crate::session::error::StoreError;
use crate::session::id::Owner;

/// The rows of a transaction. Reads see the transaction's own changes.
pub(crate) trait Transaction {
    /// The error of a request that is refused, or of storage that fails.
    type Error: From<StoreError>;

    /// Returns the error for rows that contradict each other.
    fn damaged(reason: String) -> Self::Error;

    // ---- Reading

    /// Returns a session of any owner.
    fn find_session(&self, id: &str) -> Result<Option<SessionRow>, Self::Error>;

    fn find_version(&self, id: &str) -> Result<Option<VersionRow>, Self::Error>;

    /// Returns how many sessions an owner has.
    fn count_sessions(&self, owner: Owner) -> Result<u64, Self::Error>;

    /// Returns all versions that a session lists, oldest first.
    fn lineage(&self, session: &str) -> Result<Vec<LineageEntry>, Self::Error>;

    /// Returns the oldest versions that a session keeps (or, if `kept` is false, that it lists without their snapshots)
    /// with their positions: at most `limit`. Reads no further rows.
    fn oldest(&self, session: &str, kept: bool, limit: usize) -> Result<Vec<(u64, String)>, Self::Error>;

    /// Returns the position of a version in a session's list, and whether the session keeps it.
    fn position(&self, session: &str, version: &str) -> Result<Option<(u64, bool)>, Self::Error>;

    /// Returns when the receipt under a key expires, if there is one.
    fn receipt_ends(&self, owner: Owner, key: &str) -> Result<Option<u64>, Self::Error>;

    // ---- Changing

    /// Takes the number of the next session in the order of creation.
    fn number(&mut self) -> Result<u64, Self::Error>;

    /// Adds, changes or removes a session's row. `old` is the existing row.
    fn put_session(&mut self, id: &str, old: Option<&SessionRow>, new: Option<&SessionRow>) -> Result<(), Self::Error>;

    /// Adds a version to a session's list.
    fn put_entry(&mut self, session: &str, position: u64, version: &str, kept: bool) -> Result<(), Self::Error>;

    /// Removes a version from a session's list and returns it; `None` if the list has none at this position, or `kept`
    /// is wrong.
    fn remove_entry(&mut self, session: &str, position: u64, kept: bool) -> Result<Option<String>, Self::Error>;

    /// Adds a version that nothing points to yet, and its text.
    fn add_new(&mut self, version: &NewVersion) -> Result<(), Self::Error>;

    /// Replaces the row of a version.
    fn put_version(&mut self, id: &str, row: &VersionRow) -> Result<(), Self::Error>;

    /// Changes how many holders keep a version and how many list it. A version that no holder keeps becomes garbage;
    /// one that no holder lists is removed.
    fn point(&mut self, id: &str, kept_by: i64, known_by: i64) -> Result<(), Self::Error>;

    /// Stores a response, which keeps its version. The version has already been added.
    fn put_response(&mut self, id: &str, row: &ResponseRow) -> Result<(), Self::Error>;

    /// Stores a receipt, replacing any earlier one under the same key.
    fn put_receipt(&mut self, owner: Owner, receipt: &NewReceipt<Vec<u8>>) -> Result<(), Self::Error>;

    // ---- What follows from these

    /// Returns the owner's session; a session of another owner counts as not found.
    fn own_session(&self, owner: Owner, id: &str) -> Result<SessionRow, Self::Error> {
        let row = self.find_session(id)?.filter(|row| row.owner == owner);
        Ok(row.ok_or(StoreError::SESSION)?)
    }

    /// Returns a version that another row names, so that it must exist.
    fn require_version(&self, id: &str) -> Result<VersionRow, Self::Error> {
        self.find_version(id)?.ok_or_else(|| Self::damaged(format!("version {id} has no row")))
    }

    /// Returns the owner's version, if its snapshot still exists.
    fn kept_version(&self, owner: Owner, id: &str) -> Result<VersionRow, Self::Error> {
        let row = self.find_version(id)?.filter(|row| row.owner == owner && row.kept_by > 0);
        Ok(row.ok_or(StoreError::VERSION)?)
    }

    /// Refuses if `more` sessions would exceed the owner's quota.
    fn check_session_quota(&self, owner: Owner, more: usize, bound: usize) -> Result<(), Self::Error> {
        let (found, bound) = (self.count_sessions(owner)? + more as u64, bound as u64);
        if found > bound { Err(StoreError::Quota { quota: "sessions", bound, found }.into()) } else { Ok(()) }
    }

    /// Refuses if the key of the new receipt already has an unexpired one.
    fn check_receipt<A>(&self, owner: Owner, new: Option<&NewReceipt<A>>) -> Result<(), Self::Error> {
        let Some(NewReceipt { key, now, .. }) = new else { return Ok(()) };
        match self.receipt_ends(owner, key)? {
            Some(ends) if ends > *now => Err(StoreError::Answered.into()),
            _ => Ok(()),
        }
    }

    /// Adds a session with these versions, oldest first; the flag says whether the session keeps the snapshot. `row`
    /// names the head.
    fn add_session(
        &mut self,
        id: &str,
        mut row: SessionRow,
        versions: &[(String, bool)],
    ) -> Result<SessionRow, Self::Error> {
        row.number = self.number()?;
        for (position, (version, kept)) in (0..).zip(versions) {
            self.put_entry(id, position, version, *kept)?;
        }
        row.next = versions.len() as u64;
        row.kept = versions.iter().filter(|(_, kept)| *kept).count() as u64;
        row.known = row.next - row.kept;
        self.put_session(id, None, Some(&row))?;
        Ok(row)
    }

    /// Removes a session and its list.
    fn remove_session(&mut self, id: &str, row: &SessionRow) -> Result<(), Self::Error> {
        for LineageEntry { position, version, kept } in self.lineage(id)? {
            self.remove_entry(id, position, kept)?;
            self.point(&version, -i64::from(kept), -1)?;
        }
        self.put_session(id, Some(row), None)
    }
}
