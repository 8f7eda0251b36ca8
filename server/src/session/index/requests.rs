//! The changes that the store requests from an index.

use std::fmt;
use std::sync::Arc;

use super::capacity::Reservation;
use super::rows::{ResponseRow, SessionRow, StreamRow, VersionRow};
use super::text_row::EncodedText;
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::patch::Metadata;

/// Maximum number of ancestors that a session adopts when its head moves to another version. It is bounded because
/// other requests wait for the transaction. Small in tests, like [`MAX_FORK_ROWS`], so that tests of the index reach
/// it.
pub(crate) const MAX_ADOPTED: usize = if cfg!(test) { 2 } else { 10_000 };

/// Maximum number of rows that one fork request may write, because other requests wait for its transaction.
pub(crate) const MAX_FORK_ROWS: usize = if cfg!(test) { 6 } else { 20_000 };

/// How many versions a session keeps and lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Number of kept snapshots, including the head's and excluding those of tagged versions.
    pub(crate) keep: usize,
    /// Number of listed versions whose snapshots are gone.
    pub(crate) lineage: usize,
}

impl Bounds {
    /// Returns the maximum number of ancestors that a session adopts with a version.
    pub(crate) fn most_adopted(self) -> usize {
        self.keep.saturating_add(self.lineage).min(MAX_ADOPTED)
    }
}

/// A version to add. Its object has already been written.
#[derive(Clone, Debug)]
pub(crate) struct NewVersion {
    pub(crate) id: VersionId,
    pub(crate) row: VersionRow,
    /// The text that it adds to its parent's text, if texts are kept. The row names the parent.
    pub(crate) text: Option<EncodedText>,
    /// Space reserved for the object and the text. It counts as used from this transaction on.
    pub(crate) reserved: Vec<Arc<Reservation>>,
}

/// The answer to a request, stored so that a retry of the request gets the same answer.
///
/// The request is refused with [`StoreError::Answered`], and changes nothing, if the key already has an unexpired
/// receipt: the same request has been completed in the meantime, perhaps on another server. Only
/// [`Index::put_receipt`](super::Index::put_receipt) replaces such a receipt.
#[derive(Clone, Debug)]
pub(crate) struct NewReceipt<A> {
    pub(crate) key: String,
    /// The time of the request. An earlier receipt that ends later than this has not expired.
    pub(crate) now: u64,
    pub(crate) ends: u64,
    pub(crate) answer: A,
}

/// Makes the answer from the sessions that a request creates and from their head. The index calls it before it changes
/// anything, because a request whose answer cannot be made must create no session. So the numbers and counts in the
/// rows are not known yet.
#[derive(Clone)]
pub(crate) struct Answer(pub(crate) Arc<AnswerOf>);

type AnswerOf = dyn Fn(&Forks) -> Result<Vec<u8>, StoreError> + Send + Sync;

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Answer")
    }
}

/// Bytes that a receipt takes in the index, in addition to its key and answer.
const RECEIPT_ROW: usize = 256;

/// Returns what a receipt counts toward the budgets: its key, its answer, and the overhead in the index.
pub(crate) fn receipt_bytes(key: &str, answer: &[u8]) -> u64 {
    (key.len() + answer.len() + RECEIPT_ROW) as u64
}

/// Creates a session.
#[derive(Clone, Debug)]
pub(crate) struct Create {
    pub(crate) id: SessionId,
    /// The session's row, which names the head. The index fills in the counts.
    pub(crate) row: SessionRow,
    /// The head, if it is new. `None` if the head is an existing version of the same owner whose snapshot is kept.
    pub(crate) version: Option<NewVersion>,
    /// Whether to replace the session with this id, if there is one. Otherwise the id must be new.
    pub(crate) replace: bool,
    pub(crate) max_sessions: usize,
    pub(crate) receipt: Option<NewReceipt<Answer>>,
}

/// Commits a turn.
#[derive(Clone, Debug)]
pub(crate) struct Commit {
    pub(crate) owner: Owner,
    pub(crate) session: SessionId,
    /// The head from which the turn started. If the session's head differs by now, the commit is refused.
    pub(crate) expected: VersionId,
    pub(crate) version: NewVersion,
    /// Sessions that start as forks from the expected version, each with a version of its own.
    pub(crate) forks: Vec<(SessionId, NewVersion)>,
    pub(crate) max_sessions: usize,
    pub(crate) bounds: Bounds,
    pub(crate) now: u64,
    pub(crate) receipt: Option<NewReceipt<Vec<u8>>>,
}

/// Moves a session's head.
#[derive(Clone, Debug)]
pub(crate) struct Rewind {
    pub(crate) owner: Owner,
    pub(crate) session: SessionId,
    /// The expected head. If the session's head differs by now, the request is refused.
    pub(crate) expected: VersionId,
    pub(crate) to: VersionId,
    pub(crate) bounds: Bounds,
    pub(crate) now: u64,
}

/// Creates forks.
#[derive(Clone, Debug)]
pub(crate) struct Fork {
    pub(crate) owner: Owner,
    pub(crate) session: SessionId,
    /// The version to fork from; the head by default.
    pub(crate) from: Option<VersionId>,
    /// The ids of the forks.
    pub(crate) ids: Vec<SessionId>,
    /// The client's metadata, if it differs from the session's.
    pub(crate) metadata: Option<Metadata>,
    /// Time to live in seconds; by default the session's.
    pub(crate) ttl: Option<u64>,
    pub(crate) max_sessions: usize,
    pub(crate) now: u64,
    pub(crate) receipt: Option<NewReceipt<Answer>>,
}

/// New sessions that have the same head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Forks {
    pub(crate) sessions: Vec<(SessionId, SessionRow)>,
    pub(crate) head: VersionRow,
}

/// Stores a response.
#[derive(Clone, Debug)]
pub(crate) struct NewResponse {
    pub(crate) id: ResponseId,
    /// The response's row, which names the version.
    pub(crate) row: ResponseRow,
    pub(crate) version: NewVersion,
    pub(crate) receipt: Option<NewReceipt<Vec<u8>>>,
}

/// Stores a stream.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "postgres"), allow(dead_code, reason = "the embedded index has no streams"))]
pub(crate) struct NewStream {
    pub(crate) id: String,
    pub(crate) row: StreamRow,
    /// When the stream may be removed, in unix milliseconds.
    pub(crate) ends: u64,
}
