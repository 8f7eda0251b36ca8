//! Why a request to the index failed.

use crate::session::error::StoreError;
use crate::session::index::DamagedText;

/// The cause of a failed transaction, or of one failed request in it.
#[derive(Debug)]
pub(crate) enum IndexError {
    /// This request is refused. Other requests in the same transaction can proceed.
    Refused(StoreError),
    /// A row has unexpected content. Other rows may be fine.
    Row(String),
    /// The index failed.
    Broken(redb::Error),
}

macro_rules! broken_by {
    ($($error:ty),*) => {$(
        impl From<$error> for IndexError {
            fn from(error: $error) -> Self {
                Self::Broken(error.into())
            }
        }
    )*};
}

impl From<StoreError> for IndexError {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<DamagedText> for IndexError {
    fn from(DamagedText(reason): DamagedText) -> Self {
        Self::Row(reason)
    }
}

impl From<std::io::Error> for IndexError {
    fn from(error: std::io::Error) -> Self {
        Self::Broken(redb::Error::Io(error))
    }
}

broken_by!(redb::StorageError, redb::TableError, redb::TransactionError, redb::CommitError, redb::SetDurabilityError);

impl IndexError {
    pub(crate) fn to_store_error(&self) -> StoreError {
        match self {
            Self::Refused(error) => error.clone(),
            Self::Row(reason) => StoreError::Unavailable { reason: format!("index error: {reason}") },
            Self::Broken(redb::Error::Io(error)) => StoreError::from_io("index error", error),
            Self::Broken(error) => StoreError::Unavailable { reason: format!("index error: {error}") },
        }
    }

    /// Returns whether redb must be reopened: after a disk failure or a panic, it refuses all further work.
    pub(super) fn needs_reopen(&self) -> bool {
        use redb::Error::{Corrupted, DatabaseClosed, Io, LockPoisoned, PreviousIo};
        matches!(self, Self::Broken(Io(_) | PreviousIo | DatabaseClosed | LockPoisoned(_) | Corrupted(_)))
    }
}
