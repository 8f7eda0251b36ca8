//! Counts the memory of request bodies against their owners, so that unfinished bodies cannot fill the server's memory.

use std::sync::{Arc, OnceLock};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::Next;
use axum::response::Response;
use futures_util::{StreamExt, stream};

use super::closing;
use crate::api::auth::owner;
use crate::api::error::ApiError;
use crate::api::formats::json::{check_declared, declared_length};
use crate::api::memory::BodyShare;
use crate::api::models::Models;
use crate::api::sessions::snapshots::is_file;
use crate::api::state::AppState;

/// Middleware that answers 429 when a body needs more memory than its owner may take. A body that no handler accepts,
/// judging by the request's head, is refused before it arrives. The memory is freed once the handler drops the bytes
/// that it parses; a handler that reads no body takes none.
pub(in crate::api) async fn count_body(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let (share, most) = (state.body_memory().begin(owner::current()), longest(&state, request.headers()));
    let accepted = check_head(request.headers(), most);
    let refusal = Arc::new(OnceLock::new());
    let refused = Arc::clone(&refusal);
    let request = request.map(|body| {
        Body::from_stream(stream::once(async move {
            let received = match accepted {
                Ok(()) => receive(body, share, most).await,
                Err(error) => Err(Failure::Refused(error)),
            };
            received.map_err(|error| match error {
                Failure::Unread(error) => error,
                Failure::Refused(error) => {
                    let reason = axum::Error::new(error.message().to_owned());
                    // Set once: the stream ends here.
                    let _ = refused.set(error);
                    reason
                }
            })
        }))
    });
    let response = next.run(request).await;
    refusal.get().cloned().map_or(response, closing)
}

/// Why a body could not be received.
enum Failure {
    /// The body did not arrive.
    Unread(axum::Error),
    /// The body needs too much memory, or no handler accepts it.
    Refused(ApiError),
}

/// Checks the declared length and type of a JSON body. Handlers of files check their own, and a body without a length
/// may turn out to be empty, which some handlers accept whatever its type.
fn check_head(headers: &HeaderMap, most: usize) -> Result<(), ApiError> {
    match declared_length(headers).filter(|_| !is_file(headers)) {
        Some(length) => check_declared(headers, length, most),
        None => Ok(()),
    }
}

/// A body that is counted as long as it is in memory.
struct Counted {
    bytes: Vec<u8>,
    _share: BodyShare,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Receives a body in one piece, together with its share. Handlers take it over without a copy. Stops after `most`
/// bytes: handlers refuse longer bodies.
async fn receive(body: Body, mut share: BodyShare, most: usize) -> Result<Bytes, Failure> {
    let (mut bytes, mut parts) = (Vec::new(), body.into_data_stream());
    while bytes.len() <= most
        && let Some(part) = parts.next().await
    {
        let part = part.map_err(Failure::Unread)?;
        share.reserve(part.len() as u64).map_err(Failure::Refused)?;
        bytes.extend_from_slice(&part);
    }
    Ok(Bytes::from_owner(Counted { bytes, _share: share }))
}

/// Returns the longest body that a handler accepts, in bytes. Only snapshots are sent as files, and it is not known yet
/// which model one belongs to.
fn longest(state: &AppState, headers: &HeaderMap) -> usize {
    let most = state.options().max_body_bytes;
    if !is_file(headers) {
        return most;
    }
    let several = state.models().map(Models::entries).unwrap_or_default();
    let instances = several.iter().filter_map(|entry| entry.instance()).chain(state.instance().cloned());
    instances.map(|instance| instance.served.codec.max_file_bytes()).fold(most, usize::max)
}
