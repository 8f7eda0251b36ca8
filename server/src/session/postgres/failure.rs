//! The failures of database requests, and how they are handled.

use std::error::Error as _;

use deadpool_postgres::{HookError, PoolError, TimeoutType};
use tokio_postgres::Error;
use tokio_postgres::error::{DbError, SqlState};

use crate::session::error::StoreError;

/// The cause of a failed transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The request is refused.
    Refused(StoreError),
    /// Another transaction was in the way. The same request may succeed if it is repeated.
    Conflict(String),
    /// The database cannot be used at all.
    Down(String),
    /// This request failed; others may succeed.
    Failed(StoreError),
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Refused(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error.as_db_error() {
            Some(error) => Self::from_database(error),
            None => Self::Down(described(&error)),
        }
    }
}

impl From<PoolError> for Failure {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Backend(error) | PoolError::PostCreateHook(HookError::Backend(error)) => error.into(),
            PoolError::Timeout(TimeoutType::Wait) => Self::Failed(unavailable("all connections are in use")),
            PoolError::Closed => Self::Failed(unavailable("the index is closed")),
            _ => Self::Down("no connection within the time limit".to_owned()),
        }
    }
}

impl Failure {
    fn from_database(error: &DbError) -> Self {
        let (code, text) = (error.code(), format!("{} (SQLSTATE {})", error.message(), error.code().code()));
        if *code == SqlState::T_R_SERIALIZATION_FAILURE || *code == SqlState::T_R_DEADLOCK_DETECTED {
            return Self::Conflict(text);
        }
        if *code == SqlState::UNIQUE_VIOLATION {
            // A session, owner or receipt that another transaction has just added is found by the next attempt.
            // Versions have random ids, so a row with the same one can only be the claim of a sweep.
            return match error.table() {
                Some("versions") => Self::Failed(StoreError::Unavailable {
                    reason: "its snapshot was removed, because its upload took too long".to_owned(),
                }),
                _ => Self::Conflict(text),
            };
        }
        if *code == SqlState::DISK_FULL {
            return Self::Failed(StoreError::Full { reason: "PostgreSQL has no space left on its device".to_owned() });
        }
        // Failures of connections, credentials or the database itself, shutdown and restart, or a standby that accepts
        // no writes.
        let classes = ["08", "28", "3D", "53", "58", "57P"];
        let down = classes.iter().any(|class| code.code().starts_with(class));
        if down || *code == SqlState::READ_ONLY_SQL_TRANSACTION {
            return Self::Down(text);
        }
        Self::Failed(unavailable(text))
    }

    pub(super) fn into_store_error(self) -> StoreError {
        match self {
            Self::Refused(error) | Self::Failed(error) => error,
            Self::Conflict(reason) | Self::Down(reason) => unavailable(reason),
        }
    }
}

pub(super) fn unavailable(reason: impl AsRef<str>) -> StoreError {
    StoreError::Unavailable { reason: format!("PostgreSQL: {}", reason.as_ref()) }
}

/// Returns the error for rows that contradict each other.
pub(super) fn damaged(reason: impl AsRef<str>) -> StoreError {
    StoreError::Unavailable { reason: format!("index error: {}", reason.as_ref()) }
}

/// Describes an error and its causes.
pub(super) fn described(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
