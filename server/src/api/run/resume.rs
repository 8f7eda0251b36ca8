//! `/v1/streams/{id}`: resumes a stream after a disconnect, or ends it.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

use super::{sink, takeover};
use crate::api::auth::owner::Caller;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::formats::completions::CompletionChunk;
use crate::api::openapi::{Error, Events, Id, LastEventId};
use crate::api::state::AppState;

type StreamEvents = Events<CompletionChunk<'static>, ErrorBody>;

/// Resume a stream after a disconnect
///
/// Sends the stream of a turn with `"on_disconnect": "continue"`, from the event after `last-event-id`, or from the
/// first. Where several servers share sessions, this server continues the stream of another server that has died or
/// shut down, with the same events. The response is 503 while the other server is alive and computes the stream.
#[utoipa::path(
    get,
    path = "/v1/streams/{id}",
    operation_id = "followStream",
    tag = "text",
    params(Id, LastEventId),
    responses(
        (status = 200, description = "The events of the stream, each with its number as `id`.",
            content((inline(StreamEvents) = "text/event-stream"))),
        Error<400>,
        Error<404>,
        Error<409>,
        Error<410>,
        Error<503>
    )
)]
pub(in crate::api) async fn resume(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    let last = headers.get("last-event-id").map(|value| value.to_str().unwrap_or_default());
    let next = last.map_or(Some(0), |last| last.parse::<usize>().ok()?.checked_add(1)).ok_or_else(|| {
        let message = format!("last-event-id must be the number of an event, found {:?}", last.unwrap_or_default());
        ApiError::invalid(Some("last-event-id"), message)
    })?;
    if !state.streams().has(owner, &id) {
        takeover::take_over(&state, owner, &id, next).await?;
        if !state.streams().has(owner, &id) {
            // The run has already given up the stream.
            return Err(takeover::unavailable(
                "the stream could not be continued, and is computed again: ask once more",
            ));
        }
    }
    let events = state.streams().resume(owner, &id, next)?;
    Ok(sink::respond(events, state.options().keep_alive))
}

/// End a stream and its turn
///
/// The turn ends with the text so far, which is committed, as with `"on_disconnect": "commit"`. Readers of the stream
/// get its end; then its events are gone. After the end of the turn, only its events are deleted. If another server
/// computes the stream, only its record is removed: no server takes it over, and its turn runs to its end.
#[utoipa::path(
    delete,
    path = "/v1/streams/{id}",
    operation_id = "endStream",
    tag = "text",
    params(Id),
    responses((status = 204, description = "The turn ends."), Error<400>, Error<404>, Error<503>)
)]
pub(in crate::api) async fn end(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    let here = state.streams().has(owner, &id);
    // Withdraw the record before the turn ends early, so that no other server computes the whole turn. If one already
    // does, the turn here commits nothing.
    if !state.streams().withdraw(owner, &id).await? {
        match takeover::forget(&state, owner, &id).await {
            Err(error) if !here || error.status() != StatusCode::NOT_FOUND => return Err(error),
            _ => {}
        }
    }
    if here {
        state.streams().delete(owner, &id)?;
    }
    Ok(StatusCode::NO_CONTENT)
}
