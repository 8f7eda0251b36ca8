//! Models, health and readiness.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use serde_json::{Value, json};

use super::error::ApiError;
use super::state::{AppState, Served};

fn model(served: &Served) -> Value {
    let mut model = json!({"id": served.name, "object": "model", "created": served.created, "owned_by": "tidegate"});
    if served.reads_sources() {
        model["max_source_tokens"] = served.limits.longest_prompt().into();
    }
    model
}

/// `GET /v1/models`
pub(super) async fn models(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    let served = state.ready()?;
    Ok(Json(json!({"object": "list", "data": [model(served)]})))
}

/// `GET /v1/models/{id}`
pub(super) async fn one_model(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let served = state.ready()?;
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("model"), rejection.to_string()))?;
    served.check_name(&id, Some("model"))?;
    Ok(Json(model(served)))
}

/// `GET /health`: the process answers.
pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// `GET /ready`: the weights are loaded and the engine takes requests.
pub(super) async fn ready(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    state.ready().map(|_| Json(json!({"status": "ready"})))
}

/// Any path that there is not.
pub(super) async fn not_found(uri: Uri) -> ApiError {
    let message = format!("there is nothing at {}", uri.path());
    ApiError::request(StatusCode::NOT_FOUND, None, Some("not_found"), message)
}

/// A path that there is, with a method that it does not have.
pub(super) async fn method_not_allowed() -> ApiError {
    let message = "this path does not answer to this method; the allow header has those that it does";
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, None, Some("method_not_allowed"), message)
}
