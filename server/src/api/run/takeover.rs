//! Takes over streams of servers that have died or given them up: finds the record of a stream, and computes its events
//! again.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use tokio::time::{Instant, sleep};

use super::recording::{Recording, StreamRecord};
use super::streams::{Streams, no_longer_kept};
use crate::api::error::ApiError;
use crate::api::formats::chat::ChatRequest;
use crate::api::formats::completions::CompletionRequest;
use crate::api::formats::format::{Format, repeat};
use crate::api::state::AppState;
use crate::session::{Owner, Store, StoreError};

/// How long a request waits for a stream that another server holds, and how often it looks. Short in tests, one of
/// which waits for the whole time.
const WAIT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 15 });
const POLL: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 500 });

/// Takes over a stream: returns once this server has its log. The client lacks the events from `next` on.
pub(super) async fn take_over(state: &AppState, owner: Owner, id: &str, next: usize) -> Result<(), ApiError> {
    let deadline = Instant::now() + WAIT;
    loop {
        if state.streams().has(owner, id) {
            return Ok(());
        }
        let store = find(state, owner, id).await?;
        if state.is_draining() {
            let message = "the server is shutting down";
            return Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message));
        }
        // Another request may already be taking it over.
        if let Some(_claim) = state.streams().claim(id)
            && store.take_stream(owner, id).await.map_err(missing)?
        {
            // Read the record again: until now, its previous holder may have replaced it.
            let record = store.stream(owner, id).await.map_err(missing)?;
            let record: StreamRecord = serde_json::from_slice(&record).map_err(|_| no_longer_kept())?;
            let recording = Recording::new(state, (store, owner, id.to_owned()), record, Some(next));
            start(state, owner, recording).await?;
            state.metrics().taken_over();
            return Ok(());
        }
        if Instant::now() + POLL > deadline {
            return Err(unavailable("another server still computes the stream, and only that one can send it now"));
        }
        sleep(POLL).await;
    }
}

/// Runs the recorded request. Its events go to the stream's log, where they are read.
async fn start(state: &AppState, owner: Owner, recording: Recording) -> Result<Response, ApiError> {
    let (state, path) = (state.clone(), Some(&*recording.record.path));
    let response = if path == CompletionRequest::IDEMPOTENT_PATH {
        repeat::<CompletionRequest>(state, owner, recording).await
    } else if path == ChatRequest::IDEMPOTENT_PATH {
        repeat::<ChatRequest>(state, owner, recording).await
    } else {
        Err(no_longer_kept())
    };
    // The version that the turn starts from is gone, so nothing can be computed again.
    response.map_err(|error| if error.param() == Some("version") { no_longer_kept() } else { error })
}

/// Removes the record of a stream. If the server that holds the stream is alive, its turn runs to its end.
pub(super) async fn forget(state: &AppState, owner: Owner, id: &str) -> Result<(), ApiError> {
    let store = find(state, owner, id).await?;
    Ok(store.delete_stream(owner, id).await?)
}

/// Finds the store that has the record of a stream.
async fn find(state: &AppState, owner: Owner, id: &str) -> Result<Store, ApiError> {
    let stores = state.stores();
    if stores.is_empty() {
        // A server that has just started has no store yet, and must not say that the stream does not exist.
        state.ready()?;
    }
    for store in stores.into_iter().filter(|store| store.is_shared() && Streams::is_id(id)) {
        match store.stream(owner, id).await {
            Ok(_) => return Ok(store),
            Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(missing(StoreError::STREAM))
}

/// Creates the error for a stream that will be available later.
pub(super) fn unavailable(message: &str) -> ApiError {
    ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "stream_unavailable", message)
}

fn missing(error: StoreError) -> ApiError {
    match error {
        StoreError::NotFound { .. } => ApiError::missing("id", "stream"),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests;
