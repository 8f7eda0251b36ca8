//! Recognises retries by their `Idempotency-Key`.

use axum::http::HeaderMap;

use super::idempotency::Ticket;
use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::state::AppState;
use crate::session::Owner;

/// Longest key that is accepted.
const MAX_KEY_BYTES: usize = 255;

/// Whether a request is a retry.
pub(in crate::api) enum Attempt {
    /// Unknown: it has no key.
    Unmarked,
    /// The first request with its key.
    First(Ticket),
    /// A retry; this is the body of the first response.
    Retry(String),
}

/// Looks a request up by its `Idempotency-Key`.
pub(in crate::api) async fn attempt(
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
    path: &str,
    body: &[u8],
) -> Result<Attempt, ApiError> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(Attempt::Unmarked) };
    // A receipt keeps the text of the answer.
    context::check_may_store("idempotency-key")?;
    let plain = |key: &&str| (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    let Some(key) = key.to_str().ok().filter(plain) else {
        let message = format!("idempotency-key must be 1 to {MAX_KEY_BYTES} printable ASCII characters");
        return Err(ApiError::invalid(Some("idempotency-key"), message));
    };
    let ticket = state.in_flight().begin(owner, key, path, body)?;
    match state.store()?.receipt(owner, key).await? {
        None => Ok(Attempt::First(ticket)),
        Some(receipt) => Ok(Attempt::Retry(ticket.first_body(&receipt)?)),
    }
}
