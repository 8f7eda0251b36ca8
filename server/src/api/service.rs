//! Models, health and readiness; the responses to unknown paths and methods.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::openapi::Error;
use super::openapi::literals::literals;
use super::state::{AppState, Served};

literals!(ListKind = "list", ModelKind = "model", HealthStatus = "ok", ReadyStatus = "ready");

/// A model that is served.
#[derive(Serialize, ToSchema)]
pub(super) struct Model {
    id: String,
    object: ModelKind,
    /// When it was loaded, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    /// Of an encoder-decoder, whose prompts are sources to translate: tokens of the longest source.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_source_tokens: Option<usize>,
}

impl Model {
    fn new(served: &Served) -> Self {
        Self {
            id: served.name.clone(),
            object: ModelKind,
            created: served.created,
            owned_by: "tidegate",
            max_source_tokens: served.reads_sources().then(|| served.limits.longest_prompt()),
        }
    }
}

/// The models that are served: one.
#[derive(Serialize, ToSchema)]
pub(super) struct Models {
    object: ListKind,
    data: [Model; 1],
}

#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    #[schema(inline)]
    status: HealthStatus,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Readiness {
    #[schema(inline)]
    status: ReadyStatus,
}

/// List the models
#[utoipa::path(
    get,
    path = "/v1/models",
    operation_id = "listModels",
    tag = "service",
    responses((status = 200, description = "The one model that is served.", body = Models), Error<503>)
)]
pub(super) async fn models(State(state): State<AppState>) -> Result<Json<Models>, ApiError> {
    Ok(Json(Models { object: ListKind, data: [Model::new(state.ready()?)] }))
}

/// Retrieve a model
#[utoipa::path(
    get,
    // A model's name may contain slashes.
    path = "/v1/models/{*id}",
    operation_id = "retrieveModel",
    tag = "service",
    params(("id" = String, Path, min_length = 1, description = "The model's name, which may contain slashes.")),
    responses((status = 200, description = "The model.", body = Model), Error<400>, Error<404>, Error<503>)
)]
pub(super) async fn one_model(
    State(state): State<AppState>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let served = state.ready()?;
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("model"), rejection.to_string()))?;
    served.check_name(&id, Some("model"))?;
    Ok(Json(Model::new(served)))
}

/// Check that the process responds
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "health",
    tag = "service",
    responses((status = 200, description = "It does.", body = Health))
)]
pub(super) async fn health() -> Json<Health> {
    Json(Health { status: HealthStatus })
}

/// Check that the model is loaded and takes requests
#[utoipa::path(
    get,
    path = "/ready",
    operation_id = "ready",
    tag = "service",
    responses((status = 200, description = "It does.", body = Readiness), Error<503>)
)]
pub(super) async fn ready(State(state): State<AppState>) -> Result<Json<Readiness>, ApiError> {
    state.ready().map(|_| Json(Readiness { status: ReadyStatus }))
}

/// The response to an unknown path.
pub(super) async fn not_found(uri: Uri) -> ApiError {
    ApiError::request(StatusCode::NOT_FOUND, None, Some("not_found"), format!("no route matches {}", uri.path()))
}

/// The response to a method that the path does not support.
pub(super) async fn method_not_allowed() -> ApiError {
    let message = "method not allowed; the allow header lists the methods of this path";
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, None, Some("method_not_allowed"), message)
}
