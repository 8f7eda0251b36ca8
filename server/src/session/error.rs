//! Why the store did not do what it was asked, in words for the one who asked.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::VersionId;

/// A request that the store refuses, or could not fulfil. In each case nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is no such thing, or it is another owner's: which of both is not told.
    #[error("no {what} has this id")]
    NotFound {
        /// What was looked for.
        what: &'static str,
    },
    /// Somebody else's turn is running on the session.
    #[error("the session is in use; try again in {} s", retry_after.as_secs())]
    Busy {
        /// When to try again.
        retry_after: Duration,
    },
    /// The session has moved on since the version that the caller knows.
    #[error("the session's head is {head}, another version than was asked for")]
    Stale {
        /// Where the session is.
        head: VersionId,
    },
    /// An owner would have more than an owner may.
    #[error("{quota} may be at most {bound} for each owner; this would make {found}")]
    Quota {
        /// Of what.
        quota: &'static str,
        /// The most.
        bound: u64,
        /// What there would be.
        found: u64,
    },
    /// There is no room, and nothing that could be dropped to make some.
    #[error("the store is full ({reason}); nothing was lost: delete sessions, or try again later")]
    Full {
        /// The bound that was met.
        reason: String,
    },
    /// More forks at once, of a session with so many versions, than one transaction is to write.
    #[error("n is {n}, for a session of {versions} versions it must be at most {}", bound / versions)]
    Forks {
        /// How many were asked for.
        n: usize,
        /// How many versions each would have.
        versions: usize,
        /// Bound of their product.
        bound: usize,
    },
    /// A snapshot that could not be read again; it was not kept.
    #[error("the conversation's state cannot be kept: {reason}")]
    Unfit {
        /// What is wrong with it.
        reason: String,
    },
    /// The disk, or what stands in its place, failed.
    #[error("the store cannot be reached now ({reason}); nothing has changed")]
    Unavailable {
        /// What failed.
        reason: String,
    },
    /// What was kept is not what was written.
    #[error("version {version} is damaged: {reason}")]
    Corrupt {
        /// Which.
        version: VersionId,
        /// How.
        reason: String,
    },
    /// The index cannot be opened.
    #[error("the index {} cannot be used: {reason}", path.display())]
    Index {
        /// Its file.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// An option that makes no sense.
    #[error("{name} is {found}, must be at least {bound}")]
    Option {
        /// Its name.
        name: &'static str,
        /// Its value.
        found: u64,
        /// The least.
        bound: u64,
    },
}

impl StoreError {
    pub(crate) const SESSION: Self = Self::NotFound { what: "session" };
    pub(crate) const VERSION: Self = Self::NotFound { what: "version" };
    pub(crate) const RESPONSE: Self = Self::NotFound { what: "response" };

    /// What an error of the operating system, somewhere below `error`, means for the caller.
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
