//! The interface to the index: which sessions there are, and the versions that each one points to. It holds no snapshots,
//! and what is behind it is not seen from here.
//!
//! Each function is one transaction, except [`Index::expire`] and [`Index::prune_texts`], which may take several, so that other
//! requests do not wait long for them, and [`Index::evict`] of an index that several servers share, which may take one for each
//! owner. When one that changes something returns, the change is stored as the options of the
//! index say; when it fails, nothing has changed, except that an index that fails while it commits may have carried out the
//! whole request. A session of another owner is not found.

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

/// Says of names (of sessions, responses or receipts) whether they must not expire whatever the index says: sessions in use,
/// and those whose last use is not in the index yet.
pub(crate) type Exempt = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Versions by id, each with the sessions that keep it.
pub(crate) type Missing = BTreeMap<String, (VersionRow, Vec<String>)>;

/// An index. Times are in unix milliseconds, where nothing else is said.
#[async_trait]
pub(crate) trait Index: Debug + Send + Sync {
    // ---- Reading

    async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError>;

    /// A session, and the version from which its next turn starts.
    async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError>;

    /// At most `limit` of an owner's sessions in order of creation, after the one with this number.
    async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError>;

    /// A session, and all versions that it lists, in the order in which it got them.
    async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError>;

    /// A version that a session lists; its head if none is named.
    async fn listed(&self, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Result<Listed, StoreError>;

    /// An owner's version, if any session or response lists it.
    async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError>;

    /// Such a version and its ancestors, the newest first: at most `limit`, and as far back as anything lists them.
    async fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, StoreError>;

    /// The rows of a version's text, its own first and then those of the texts that each continues: at least one, until
    /// they have `bytes` bytes. Empty if the version has no text.
    async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError>;

    /// A stored response, even one that has expired.
    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError>;

    /// A receipt's expiry and answer.
    async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError>;

    // ---- Sessions

    /// Checks that an owner may create a session, or replace the one that has the id.
    async fn may_create(&self, owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> Result<(), StoreError>;

    /// Creates a session. If another owner's session has the id, none is found to replace, and the request is refused.
    async fn create(&self, create: Create) -> Result<Head, StoreError>;

    /// Makes a new version the head of a session whose head is the expected one; creates the turn's forks, and stores its
    /// receipt. If the head is another one, refuses with [`StoreError::Stale`]. This is the only way in which a turn ends, and
    /// of two turns from one version only one can take it. A version that exists already is refused, so that a commit that is
    /// repeated, because its outcome was unknown, has no second effect after the head was moved back.
    async fn commit(&self, commit: Commit) -> Result<Head, StoreError>;

    /// Makes an existing version of the same owner the head of a session whose head is the expected one, even one that the session does not list. Those of its
    /// ancestors that the session does not list yet are listed as well, and the newest of them are kept if anything still
    /// keeps them.
    async fn rewind(&self, rewind: Rewind) -> Result<Head, StoreError>;

    /// Checks that an owner may create `n` forks that start from this version of a session.
    async fn may_fork(
        &self,
        owner: Owner,
        from: (&SessionId, &VersionId),
        n: usize,
        max_sessions: usize,
    ) -> Result<(), StoreError>;

    /// Creates sessions from a version that a session keeps. They list its ancestors as far as the session lists them.
    async fn fork(&self, fork: Fork) -> Result<Forks, StoreError>;

    /// Changes what a client may change of a session or one of its versions.
    async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Result<Edited, StoreError>;

    /// Removes a session, and every version that nothing else keeps.
    async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError>;

    /// Records last uses of sessions; those that are gone are passed over.
    async fn record_uses(&self, uses: HashMap<SessionId, u64>) -> Result<(), StoreError>;

    // ---- Responses and receipts

    async fn put_response(&self, response: NewResponse) -> Result<(), StoreError>;

    async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError>;

    /// Stores a receipt, replacing any earlier one under the same key.
    async fn put_receipt(&self, owner: Owner, receipt: NewReceipt<Vec<u8>>) -> Result<(), StoreError>;

    // ---- Space

    /// How much space is used and reserved.
    fn capacity(&self) -> &Capacity;

    /// Whether [`Self::expire`] or [`Self::prune_texts`] would remove anything.
    async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError>;

    /// Removes the sessions, responses and receipts that have expired, except those that are exempt, in one or several
    /// transactions. Returns how many.
    async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError>;

    /// Removes texts that no version needs any more, in one or several transactions. Returns how many.
    async fn prune_texts(&self) -> Result<usize, StoreError>;

    /// Whether evicting versions of these owners could free `missing` bytes.
    async fn can_evict(&self, victims: Victims, missing: u64) -> Result<bool, StoreError>;

    /// Evicts versions to free at least `missing` bytes, and returns how many; if that is impossible, evicts nothing.
    async fn evict(&self, victims: Victims, missing: u64, lineage: usize) -> Result<Option<usize>, StoreError>;

    // ---- Objects

    /// At most `limit` versions whose objects nothing points to any more, and that may still exist.
    async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError>;

    /// Records that these objects are removed.
    async fn forget_garbage(&self, ids: Vec<VersionId>) -> Result<(), StoreError>;

    /// Those of the objects that the index does not name, not even as garbage. Where several servers use the index, it claims
    /// them in the same transaction: a commit that would add one of these versions later is refused, so that an object that
    /// another server is still writing is never both removed and named.
    async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError>;

    /// Whether the index names every object that it may ever need. If not, no object may be removed because it is not named.
    fn names_all(&self) -> bool;

    /// The versions that need an object which is not among `objects`, each with the sessions that keep it.
    async fn missing(&self, objects: HashSet<String>) -> Result<Missing, StoreError>;

    // ---- Several servers

    /// Whether other servers use the index at the same time.
    fn is_shared(&self) -> bool {
        false
    }

    /// Takes a session's lease for this server; false if another server that is alive has it. It saves work that only one
    /// server could commit, and nothing else: what decides is the head that a commit expects.
    async fn lease(&self, _session: &SessionId) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Gives a session's lease back. Without this, it ends some time after the server.
    async fn release(&self, _session: &SessionId) {}

    /// Whether this is the server that removes what nothing needs. There is one at a time.
    async fn leads(&self) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Stores what another server needs to compute a stream again. This server is then its holder.
    async fn put_stream(&self, _stream: NewStream) -> Result<(), StoreError> {
        Ok(())
    }

    /// A stream that [`Self::put_stream`] has stored, until its end has passed.
    async fn stream(&self, _owner: Owner, _id: &str) -> Result<StreamRow, StoreError> {
        Err(StoreError::STREAM)
    }

    /// Makes this server the holder of a stream; false if another server that is alive is.
    async fn take_stream(&self, _owner: Owner, _id: &str) -> Result<bool, StoreError> {
        Err(StoreError::STREAM)
    }

    /// Gives a stream up, so that another server can take it at once; replaces its record if another one is given. Does neither
    /// if this server does not hold it.
    async fn release_stream(&self, _owner: Owner, _id: &str, _record: Option<Vec<u8>>) {}

    /// If this server holds a stream, which has ended: gives it up, and keeps it until `ends`. Removes the oldest of the
    /// owner's ended streams beyond the newest 256.
    async fn keep_stream(&self, _owner: Owner, _id: &str, _ends: u64) -> Result<(), StoreError> {
        Ok(())
    }

    /// Removes a stream if this server holds it; false if it does not. Then another server may be computing it.
    async fn withdraw_stream(&self, _owner: Owner, _id: &str) -> Result<bool, StoreError> {
        Ok(true)
    }

    /// Removes a stream, if it is there, whoever holds it.
    async fn delete_stream(&self, _owner: Owner, _id: &str) -> Result<(), StoreError> {
        Ok(())
    }

    // ---- The index itself

    /// Refuses if nothing can be stored now.
    async fn ready(&self) -> Result<(), StoreError>;

    /// Why nothing could be stored when it was last tried; `None` if it could.
    fn failure(&self) -> Option<StoreError>;

    /// How many times the index has been opened. After each, it may know less than was written. An index that several servers
    /// share loses nothing, and is opened once.
    fn opened(&self) -> u64;

    /// Number of committed transactions.
    fn transactions(&self) -> u64;

    /// Returns once everything that was committed is durable.
    async fn flush(&self) -> Result<(), StoreError>;

    /// Closes the index, once everything that was committed is durable. Later requests are refused. If making it durable fails,
    /// the index is closed nevertheless.
    async fn close(&self) -> Result<(), StoreError>;
}
