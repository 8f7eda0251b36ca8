//! The routes of text-generation-inference: `/generate`, `/generate_stream`, `/info`, and its `POST /`.

mod answer;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use self::wire::{Generate, Route};
use super::error::ApiError;
use super::foreign;
use super::auth::owner::Caller;
use super::state::AppState;
use crate::text::MAX_STOP_STRINGS;

/// `POST /generate`
pub(super) async fn generate(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    foreign::run::<Generate>(state, owner, &headers, body, |body, served| Route::Whole.read(body, served)).await
}

/// `POST /generate_stream`
pub(super) async fn generate_stream(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    foreign::run::<Generate>(state, owner, &headers, body, |body, served| Route::Stream.read(body, served)).await
}

/// `POST /`: either of them, as `stream` says.
pub(super) async fn either(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    foreign::run::<Generate>(state, owner, &headers, body, |body, served| Route::Either.read(body, served)).await
}

/// `GET /info`
pub(super) async fn info(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    let served = Arc::clone(state.ready()?);
    let limits = &served.limits;
    Ok(Json(json!({
        "model_id": served.name,
        "model_sha": served.fingerprint,
        "model_pipeline_tag": if served.reads_sources() { "text2text-generation" } else { "text-generation" },
        "max_concurrent_requests": served.engine.slots() + served.engine.queue_capacity(),
        "max_best_of": wire::MOST_BEST_OF,
        "max_stop_sequences": MAX_STOP_STRINGS,
        "max_input_tokens": limits.longest_prompt(),
        "max_total_tokens": limits.longest_prompt().saturating_add(limits.max_tokens),
        "validation_workers": std::thread::available_parallelism().map_or(1, usize::from),
        "max_client_batch_size": 1,
        "router": "tidegate",
        "version": env!("CARGO_PKG_VERSION"),
        "sha": null,
        "docker_label": null,
    })))
}

/// The status and the words that this format has for an error: what cannot be right is a 422 there.
pub(super) fn refusal(error: &ApiError) -> (StatusCode, Value) {
    let status = match error.status() {
        StatusCode::BAD_REQUEST => StatusCode::UNPROCESSABLE_ENTITY,
        status => status,
    };
    let kind = match status.as_u16() {
        401 | 403 => "authentication",
        408 => "incomplete_generation",
        429 | 503 => "overloaded",
        500.. => "generation",
        _ => "validation",
    };
    (status, json!({"error": error.message(), "error_type": kind}))
}
