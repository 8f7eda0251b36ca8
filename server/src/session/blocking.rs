//! Work that may block.

use super::error::StoreError;

/// Runs work that may block, on a thread for it.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}
