//! Runs blocking work from async code.

use super::error::StoreError;

/// Runs work that may block on a thread of the blocking pool.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}
