//! What the store asks an index to change.

use std::fmt;
use std::sync::Arc;

use super::capacity::Reservation;
use super::rows::{ResponseRow, SessionRow, StreamRow, VersionRow};
use super::text_row::EncodedText;
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::patch::Metadata;

/// Most versions that moving a session's head to one adds to the session, because other requests wait for the transaction. Few
/// in the tests of the index, so that they reach it, as for [`MAX_FORK_ROWS`].
pub(crate) const MAX_ADOPTED: usize = if cfg!(test) { 2 } else { 10_000 };

/// Most rows that one fork request may write, because other requests wait for its transaction.
pub(crate) const MAX_FORK_ROWS: usize = if cfg!(test) { 6 } else { 20_000 };

/// How many versions a session keeps and lists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Snapshots, including the head's and excluding those of tagged versions.
    pub(crate) keep: usize,
    /// Versions whose snapshots are gone.
    pub(crate) lineage: usize,
}

impl Bounds {
    /// Most ancestors that a session adopts with a version.
    pub(crate) fn most_adopted(self) -> usize {
        self.keep.saturating_add(self.lineage).min(MAX_ADOPTED)
    }
}

/// A version to add. Its object is written.
#[derive(Clone, Debug)]
pub(crate) struct NewVersion {
    pub(crate) id: VersionId,
    pub(crate) row: VersionRow,
    /// What it adds to the text of its parent, if that is kept. The row has the parent.
    pub(crate) text: Option<EncodedText>,
    /// Space for the object and the text, which counts as used from the transaction on.
    pub(crate) reserved: Vec<Arc<Reservation>>,
}

/// The answer to a request, in case the same request comes again.
///
/// The request is refused with [`StoreError::Answered`], and changes nothing, if the key has a receipt already that has not
/// expired: the same request has ended meanwhile, perhaps on another server. [`Index::put_receipt`](super::Index::put_receipt)
/// alone replaces such a receipt.
#[derive(Clone, Debug)]
pub(crate) struct NewReceipt<A> {
    pub(crate) key: String,
    /// When the request is made. An earlier receipt whose end is later has not expired.
    pub(crate) now: u64,
    pub(crate) ends: u64,
    pub(crate) answer: A,
}

/// Makes the answer from the sessions that a request creates and their head. An index calls it before it changes anything,
/// because a request whose answer cannot be made must create no session. The numbers and counts of the rows are not known then.
#[derive(Clone)]
pub(crate) struct Answer(pub(crate) Arc<AnswerOf>);

type AnswerOf = dyn Fn(&Forks) -> Result<Vec<u8>, StoreError> + Send + Sync;

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Answer")
    }
}

/// Bytes of the index for a receipt, in addition to its key and answer.
const RECEIPT_ROW: usize = 256;

/// What a receipt counts towards the budgets: its key and answer, and what the index needs beside them.
pub(crate) fn receipt_bytes(key: &str, answer: &[u8]) -> u64 {
    (key.len() + answer.len() + RECEIPT_ROW) as u64
}

/// Creates a session.
#[derive(Clone, Debug)]
pub(crate) struct Create {
    pub(crate) id: SessionId,
    /// It names the head. The index counts the versions.
    pub(crate) row: SessionRow,
    /// The head, if it is new. Otherwise it is a version of the same owner whose snapshot is kept.
    pub(crate) version: Option<NewVersion>,
    /// Whether to replace the session that has the id, if there is one. Otherwise the id is new.
    pub(crate) replace: bool,
    pub(crate) max_sessions: usize,
    pub(crate) receipt: Option<NewReceipt<Answer>>,
}

/// Ends a turn.
#[derive(Clone, Debug)]
pub(crate) struct Commit {
    pub(crate) owner: Owner,
    pub(crate) session: SessionId,
    /// The head from which the turn has started. If the head is another one by now, the commit is refused.
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
    /// If the head is another one by now, the request is refused.
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
    /// The head by default.
    pub(crate) from: Option<VersionId>,
    /// The ids of the forks.
    pub(crate) ids: Vec<SessionId>,
    /// The client's notes, if they are not those on the session.
    pub(crate) metadata: Option<Metadata>,
    /// Seconds after their last use when they expire; by default as for the session.
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
    /// It names the version.
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
    /// When it may be removed, in unix milliseconds.
    pub(crate) ends: u64,
}
