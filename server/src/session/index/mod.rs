//! The interface to the index: which sessions exist, and which versions each one points to. It holds no snapshots, and
//! it hides how they are stored.
//!
//! Each function is one transaction, with these exceptions: [`Index::expire`] and [`Index::prune_texts`] may take
//! several, so that other requests do not wait long for them, and [`Index::evict`] of a shared index may take one per
//! owner. When a function that changes something returns, the change is stored with the durability that the index's
//! options say. When it fails, nothing has changed, except that an index that fails while it commits may have carried
//! out the whole request. A session of another owner counts as not found.

pub(crate) mod branches;
mod capacity;
mod edit;
pub(crate) mod operations;
mod requests;
mod rows;
#[cfg(test)]
pub(crate) mod tests;
mod text_row;
mod transaction;
mod transfer;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;

pub(crate) use capacity::{Capacity, Change, Limits, Reservation, Shortfall, Totals, Victims};
pub(crate) use edit::{Edit, Edited};
pub(crate) use requests::{
    Answer, Bounds, Commit, Create, Fork, Forks, NewReceipt, NewResponse, NewStream, NewVersion, Rewind, receipt_bytes,
};
pub(crate) use rows::{Head, LineageEntry, Listed, ResponseRow, SessionRow, StreamRow, VersionRow};
pub(crate) use text_row::{DamagedText, EncodedText, TextRow, most_bytes, text_bytes};
pub(crate) use transaction::Transaction;
pub(crate) use transfer::{Transfer, text_chains};

use super::error::StoreError;
use super::id::{Owner, ResponseId, SessionId, VersionId};

/// A test of names of sessions, responses or receipts: whether the item must not expire, whatever the index says. It
/// holds for sessions in use, and for sessions whose last use is not in the index yet.
pub(crate) type Exempt = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Versions by id, each with the sessions that keep it.
pub(crate) type Missing = BTreeMap<String, (VersionRow, Vec<String>)>;

/// An index. Times are in unix milliseconds unless stated otherwise.
#[async_trait]
pub(crate) trait Index: Debug + Send + Sync {
    // ---- Reading

    async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError>;

    /// Returns a session, and the version from which its next turn starts.
    async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError>;

    /// Returns at most `limit` of an owner's sessions in order of creation, after the session with the number `after`.
    async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError>;

    /// Returns a session and all versions that it lists, in the order in which it got them.
    async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError>;

    /// Returns a version that a session lists; the head if `version` is `None`.
    async fn listed(&self, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Result<Listed, StoreError>;

    /// Returns an owner's version, if any session or response lists it.
    async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError>;

    /// Returns such a version and its ancestors, newest first: at most `limit`, and only as far back as anything lists
    /// them.
    async fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, StoreError>;

    /// Returns the rows of a version's text: its own row first, then the rows of the texts that each continues. Stops
    /// once they have `bytes` bytes, but returns at least one. Empty if the version has no text.
    async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// Returns a stored response, even if it has expired.
    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError>;

    /// Returns a receipt's expiry and answer.
    async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError>;

    // ---- Sessions

    /// Checks that an owner may create a session, or replace the one with this id.
    async fn may_create(&self, owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> Result<(), StoreError>;

    /// Creates a session. If the id belongs to another owner's session, there is nothing to replace, and the request is
    /// refused.
    async fn create(&self, create: Create) -> Result<Head, StoreError>;

    /// Commits a turn: makes a new version the head of a session whose head is the expected one, creates the turn's
    /// forks, and stores its receipt. If the head is a different one, refuses with [`StoreError::Stale`]. Turns end
    /// only in this way, so of two turns from one version only one can win. A version that already exists is refused,
    /// so that a commit that is repeated because its outcome was unknown has no second effect after the head was moved
    /// back.
    async fn commit(&self, commit: Commit) -> Result<Head, StoreError>;

    /// Makes an existing version of the same owner the head of a session whose head is the expected one; the session
    /// need not list the version yet. The version's ancestors that the session does not list yet are listed as well,
    /// and the newest of them are kept if anything still keeps them.
    async fn rewind(&self, rewind: Rewind) -> Result<Head, StoreError>;

    /// Checks that an owner may create `n` forks that start from this version of a session.
    async fn may_fork(
        &self,
        owner: Owner,
        from: (&SessionId, &VersionId),
        n: usize,
        max_sessions: usize,
    ) -> Result<(), StoreError>;

    /// Creates sessions from a version that a session keeps. They list its ancestors as far back as the session lists
    /// them.
    async fn fork(&self, fork: Fork) -> Result<Forks, StoreError>;

    /// Applies a client's edit to a session or to one of its versions.
    async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Result<Edited, StoreError>;

    /// Removes a session and every version that nothing else keeps.
    async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError>;

    /// Records last uses of sessions; ignores sessions that no longer exist.
    async fn record_uses(&self, uses: HashMap<SessionId, u64>) -> Result<(), StoreError>;

    // ---- Responses and receipts

    async fn put_response(&self, response: NewResponse) -> Result<(), StoreError>;

    async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError>;

    /// Stores a receipt, replacing any earlier one under the same key.
    async fn put_receipt(&self, owner: Owner, receipt: NewReceipt<Vec<u8>>) -> Result<(), StoreError>;

    // ---- Space

    /// Returns the accounting of used and reserved space.
    fn capacity(&self) -> &Capacity;

    /// Returns whether [`Self::expire`] or [`Self::prune_texts`] would remove anything.
    async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError>;

    /// Removes the sessions, responses and receipts that have expired, except exempt ones, in one or several
    /// transactions. Returns the number of removed items.
    async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError>;

    /// Removes texts that no version needs any more, in one or several transactions. Returns the number of removed
    /// texts.
    async fn prune_texts(&self) -> Result<usize, StoreError>;

    /// Returns whether evicting versions of these owners could free `missing` bytes.
    async fn can_evict(&self, victims: Victims, missing: u64) -> Result<bool, StoreError>;

    /// Evicts versions to free at least `missing` bytes, and returns how many; if that is impossible, evicts nothing
    /// and returns `None`.
    async fn evict(&self, victims: Victims, missing: u64, lineage: usize) -> Result<Option<usize>, StoreError>;

    // ---- Objects

    /// Returns at most `limit` versions whose objects may still exist although nothing points to them any more.
    async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError>;

    /// Records that these objects have been removed.
    async fn forget_garbage(&self, ids: Vec<VersionId>) -> Result<(), StoreError>;

    /// Returns the objects among `ids` that the index does not name, not even as garbage. A shared index claims them in
    /// the same transaction: it refuses a later commit that would add one of these versions, so that an object that
    /// another server is still writing is never both removed and named.
    async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError>;

    /// Returns whether the index names every object that it may ever need. If not, no object may be removed because the
    /// index does not name it.
    fn names_all(&self) -> bool;

    /// Returns the versions that need an object which is not among `objects`, each with the sessions that keep it.
    async fn missing(&self, objects: HashSet<String>) -> Result<Missing, StoreError>;

    // ---- Several servers

    /// Returns whether other servers use the index at the same time.
    fn is_shared(&self) -> bool {
        false
    }

    /// Takes a session's lease for this server; returns false if another live server holds it. The lease only saves
    /// work that could not be committed; what ensures correctness is the head that a commit expects.
    async fn lease(&self, _session: &SessionId) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Releases a session's lease. Otherwise the lease ends some time after its server stops.
    async fn release(&self, _session: &SessionId) {}

    /// Returns whether this server is the leader, which removes what nothing needs. There is one leader at a time.
    async fn leads(&self) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Stores what another server needs to compute a stream again. This server becomes the stream's holder.
    async fn put_stream(&self, _stream: NewStream) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns a stream that [`Self::put_stream`] has stored, until its expiry.
    async fn stream(&self, _owner: Owner, _id: &str) -> Result<StreamRow, StoreError> {
        Err(StoreError::STREAM)
    }

    /// Makes this server the holder of a stream; returns false if another live server holds it.
    async fn take_stream(&self, _owner: Owner, _id: &str) -> Result<bool, StoreError> {
        Err(StoreError::STREAM)
    }

    /// Releases a stream, so that another server can take it at once; replaces its record if a new one is given. Does
    /// nothing if this server does not hold the stream.
    async fn release_stream(&self, _owner: Owner, _id: &str, _record: Option<Vec<u8>>) {}

    /// Releases an ended stream that this server holds, and keeps it until `ends`. Of the owner's ended streams, only
    /// the newest 256 remain.
    async fn keep_stream(&self, _owner: Owner, _id: &str, _ends: u64) -> Result<(), StoreError> {
        Ok(())
    }

    /// Removes a stream if this server holds it; returns false if it does not, because then another server may be
    /// computing it.
    async fn withdraw_stream(&self, _owner: Owner, _id: &str) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Removes a stream if it exists, whoever holds it.
    async fn delete_stream(&self, _owner: Owner, _id: &str) -> Result<(), StoreError> {
        Ok(())
    }

    // ---- The index itself

    /// Refuses if nothing can be stored at the moment.
    async fn ready(&self) -> Result<(), StoreError>;

    /// Returns why the last attempt to store something failed; `None` if it succeeded.
    fn failure(&self) -> Option<StoreError>;

    /// Returns how many times the index has been opened. After each opening, it may lack some of what was written. A
    /// shared index loses nothing, and is opened once.
    fn opened(&self) -> u64;

    /// Returns the number of committed transactions.
    fn transactions(&self) -> u64;

    /// Waits until everything that was committed is durable.
    async fn flush(&self) -> Result<(), StoreError>;

    /// Closes the index once everything that was committed is durable. Later requests are refused. If making it durable
    /// fails, the index is closed anyway.
    async fn close(&self) -> Result<(), StoreError>;
}
