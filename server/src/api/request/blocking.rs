//! Work that would hold up other connections: parsing and encoding a long prompt takes a while.

use crate::api::error::ApiError;
use crate::api::state::AppState;

/// Runs `work` on a thread for blocking work, at most one per core at a time.
pub(in crate::api) async fn run_blocking<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = state.reader().await;
    let working = tokio::task::spawn_blocking(move || {
        // Held until the work ends, even if the client disconnects before.
        let _permit = permit;
        work()
    });
    working.await.map_err(|_| ApiError::internal())?
}
