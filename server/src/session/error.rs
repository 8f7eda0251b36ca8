//! Errors of the store.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::id::VersionId;

/// A request that the store refused or could not carry out. Nothing has changed then, except that an index that fails while
/// it commits may have carried out the whole request.
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The id does not exist or belongs to another owner; the error does not say which.
    #[error("no {what} has this id")]
    NotFound { what: &'static str },
    /// Another turn is running on the session.
    #[error("the session is in use; try again in {} s", retry_after.as_secs())]
    Busy { retry_after: Duration },
    /// The text of the version was not kept.
    #[error(
        "the text of version {version} is not kept: the server ran with --keep-text off, or was older, when it or a version \
         before it was created, or it is from a snapshot without text"
    )]
    TextNotKept { version: VersionId },
    /// A part of a text that does not exist, or is too long to be read at once.
    #[error("{parameter} must be from {least} to {most}, found {found}")]
    Range { parameter: &'static str, least: u64, most: u64, found: u64 },
    /// Messages that are too long to be read at once.
    #[error("the messages from start to end must have at most {bound} bytes; ask for fewer, or read the text")]
    LongMessages { bound: usize },
    /// Texts that have too little in common to be compared.
    #[error("the text of version {version} must have at most {bound} tokens after what both texts share")]
    FarApart { version: VersionId, bound: u64 },
    /// The session's head is not the version that the caller expected.
    #[error("the session's head is {head}, not the expected version")]
    Stale { head: VersionId },
    /// Another server has moved the session's head since the request began, so the request was not carried out.
    #[error(
        "the session was changed while this request ran, and its head is {head} now: nothing of the request was stored; read \
         the session, and send the request again"
    )]
    Conflict { head: VersionId },
    /// A request with the same idempotency key has ended meanwhile, on another server.
    #[error("a request with this idempotency-key has been answered meanwhile; send it again to get that answer")]
    Answered,
    /// The request would exceed a quota of the owner.
    #[error("{quota} per owner must be at most {bound}; this request would make it {found}")]
    Quota { quota: &'static str, bound: u64, found: u64 },
    /// There is no space, and nothing can be evicted to make some.
    #[error("the store is full ({reason}); nothing was lost: delete sessions or try again later")]
    Full { reason: String },
    /// One transaction would write too many rows: a fork writes one for each version that the session knows.
    #[error("n must be at most {} for a session of {versions} versions, found {n}", bound / versions)]
    TooManyForks { n: usize, versions: usize, bound: usize },
    /// A session would have too many tags.
    #[error("a session may have at most {bound} tags")]
    TooManyTags { bound: usize },
    /// Finding the common ancestor of two versions would read too many rows.
    #[error("the common ancestor is more than {bound} versions back")]
    FarAncestor { bound: usize },
    /// The snapshot could not be read back if it were stored, so it was not.
    #[error("the conversation's state cannot be stored: {reason}")]
    Unstorable { reason: String },
    /// The disk or object store failed.
    #[error("the store is unavailable ({reason}); the request has had no effect, or all of it")]
    Unavailable { reason: String },
    /// The stored bytes differ from those that were written.
    #[error("version {version} is damaged: {reason}")]
    Corrupt { version: VersionId, reason: String },
    /// The index cannot be opened.
    #[error("the index {} cannot be used: {reason}", path.display())]
    Index { path: PathBuf, reason: String },
    /// The index in PostgreSQL cannot be opened.
    #[error("the index in PostgreSQL cannot be used: {reason}")]
    Database { reason: String },
    /// Another process uses the folder.
    #[error("the index {} cannot be used: another process has it open", path.display())]
    InUse { path: PathBuf },
    /// An option is out of range.
    #[error("{name} must be at least {bound}, found {found}")]
    Option { name: &'static str, found: u64, bound: u64 },
}

impl StoreError {
    pub(crate) const SESSION: Self = Self::NotFound { what: "session" };
    pub(crate) const VERSION: Self = Self::NotFound { what: "version" };
    pub(crate) const RESPONSE: Self = Self::NotFound { what: "response" };
    pub(crate) const TAG: Self = Self::NotFound { what: "tag" };
    pub(crate) const STREAM: Self = Self::NotFound { what: "stream" };

    /// Converts an error of which an I/O error may be a cause: a full disk becomes [`Self::Full`].
    pub(crate) fn from_io(what: &str, error: &(dyn Error + 'static)) -> Self {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.downcast_ref::<io::Error>().is_some_and(full) {
                return Self::Full { reason: "no space left on the device".to_owned() };
            }
            cause = error.source();
        }
        Self::Unavailable { reason: format!("{what}: {error}") }
    }
}

fn full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
