//! Recognizes retries by their `Idempotency-Key`.

use axum::body::Bytes;
use axum::http::HeaderMap;

use super::idempotency::{RequestDigest, Ticket};
use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::request::blocking::{is_long, run_blocking};
use crate::api::shares::Share;
use crate::api::state::AppState;
use crate::session::Owner;

/// Longest key that is accepted, in bytes.
const MAX_KEY_BYTES: usize = 255;

/// Whether a request is a retry.
pub(in crate::api) enum Attempt {
    /// Unknown: the request has no key.
    Unmarked,
    /// The first request with its key.
    First(Ticket),
    /// A retry: the body of the first response, and the memory that is reserved for it.
    Retry(String, Option<Share>),
}

/// Looks up a request by its `Idempotency-Key`.
pub(in crate::api) async fn attempt(
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
    path: &str,
    body: &Bytes,
) -> Result<Attempt, ApiError> {
    let Some((ticket, key)) = ticket(state, owner, headers, path, body).await? else { return Ok(Attempt::Unmarked) };
    match state.store()?.receipt(owner, key).await? {
        None => Ok(Attempt::First(ticket)),
        Some(receipt) => {
            let body = ticket.first_body(&receipt)?;
            let memory = state.response_memory().reserve_repeated(owner, body.len())?;
            Ok(Attempt::Retry(body, memory))
        }
    }
}

/// Like [`attempt`], for a request that is carried out again, whatever its first result was.
pub(in crate::api) async fn repeated(
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
    path: &str,
    body: &Bytes,
) -> Result<Attempt, ApiError> {
    let ticket = ticket(state, owner, headers, path, body).await?;
    Ok(ticket.map_or(Attempt::Unmarked, |(ticket, _)| Attempt::First(ticket)))
}

/// Reserves the key of a request, if it has one.
async fn ticket<'h>(
    state: &AppState,
    owner: Owner,
    headers: &'h HeaderMap,
    path: &str,
    body: &Bytes,
) -> Result<Option<(Ticket, &'h str)>, ApiError> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(None) };
    // A receipt stores the text of the answer.
    context::check_may_store("idempotency-key")?;
    let plain = |key: &&str| (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    let Some(key) = key.to_str().ok().filter(plain) else {
        let message = format!("idempotency-key must be 1 to {MAX_KEY_BYTES} printable ASCII characters");
        return Err(ApiError::invalid(Some("idempotency-key"), message));
    };
    Ok(Some((state.in_flight().begin(owner, key, digest(state, path, body).await?)?, key)))
}

/// Returns the digest of a request to `path`.
async fn digest(state: &AppState, path: &str, body: &Bytes) -> Result<RequestDigest, ApiError> {
    if !is_long(body.len()) {
        // Hashing a short body takes less time than a change of threads.
        return Ok(RequestDigest::of(path, body));
    }
    let (path, body) = (path.to_owned(), body.clone());
    run_blocking(state, body.len(), move || Ok(RequestDigest::of(&path, &body))).await
}
