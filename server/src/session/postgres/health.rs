//! The health of the database. While it is unreachable, requests are refused at once, until a background task finds
//! that it can be reached again.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;

use super::failure::{Failure, unavailable};
use crate::session::error::StoreError;

#[derive(Debug, Default)]
pub(super) struct Health {
    failure: Mutex<Option<StoreError>>,
    /// Wakes the task that tries to reach the database again.
    pub(super) failed: Notify,
}

impl Health {
    pub(super) fn failure(&self) -> Option<StoreError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn check(&self) -> Result<(), StoreError> {
        self.failure().map_or(Ok(()), Err)
    }

    /// Records the failure of a request, and returns its error.
    pub(super) fn note(&self, failure: Failure) -> StoreError {
        let is_down = matches!(failure, Failure::Down(_));
        let error = failure.into_store_error();
        if is_down {
            let mut known = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            if known.is_none() {
                tracing::error!(%error, "PostgreSQL cannot be reached: requests that need it are refused");
            }
            *known = Some(error.clone());
            self.failed.notify_one();
        }
        error
    }

    pub(super) fn recover(&self) {
        let known = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if known.is_some() {
            tracing::info!("PostgreSQL can be reached again");
        }
    }

    /// Refuses all requests from now on.
    pub(super) fn close(&self) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(unavailable("the index is closed"));
    }
}
