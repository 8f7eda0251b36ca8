//! The routes for models, health and readiness, and the responses to unknown paths and methods.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::auth::context;
use super::error::ApiError;
use super::models::{Entry, ModelState, Models as Registry};
use super::openapi::Error;
use super::openapi::document::Description;
use super::openapi::literals::literals;
use super::served::unknown_model;
use super::state::{AppState, Served};
use crate::session::Store;

literals!(ListKind = "list", ModelKind = "model", HealthStatus = "ok", ReadyStatus = "ready");

/// The state of a model. The next request for an unloaded model loads it. A failed model could not be loaded: the log
/// has the reason, and a request tries again after a pause.
#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ModelState)]
enum LoadState {
    Loaded,
    Loading,
    Unloaded,
    Failed,
}

/// A model that is served.
#[derive(Serialize, ToSchema)]
pub(super) struct Model {
    id: String,
    object: ModelKind,
    /// When the model was loaded, or else when the server started, in seconds since 1970.
    created: u64,
    owned_by: &'static str,
    #[schema(inline)]
    state: LoadState,
    /// The longest source in tokens. Only for an encoder-decoder, whose prompts are sources to translate.
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
            state: LoadState::Loaded,
            max_source_tokens: served.reads_sources().then(|| served.limits.longest_prompt()),
        }
    }

    /// Describes one of several models.
    fn of(entry: &Entry, registry: &Registry) -> Self {
        let state = match entry.state() {
            ModelState::Loaded => LoadState::Loaded,
            ModelState::Loading => LoadState::Loading,
            ModelState::Unloaded => LoadState::Unloaded,
            ModelState::Failed => LoadState::Failed,
        };
        let (id, created) = (entry.name().to_owned(), registry.created());
        let unknown = Self { id, object: ModelKind, created, owned_by: "tidegate", state, max_source_tokens: None };
        entry.instance().map_or(unknown, |instance| Self { state, ..Self::new(&instance.served) })
    }
}

/// The served models that the API key may use, the default one first.
#[derive(Serialize, ToSchema)]
pub(super) struct Models {
    object: ListKind,
    data: Vec<Model>,
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
    responses((status = 200, description = "The models that are served.", body = Models), Error<503>)
)]
pub(super) async fn models(State(state): State<AppState>) -> Result<Json<Models>, ApiError> {
    let data = match state.models() {
        None => vec![Model::new(state.ready()?)],
        Some(registry) => {
            registry.check_open()?;
            registry.entries().iter().map(|entry| Model::of(entry, registry)).collect()
        }
    };
    let data = data.into_iter().filter(|model| context::may_use(&model.id)).collect();
    Ok(Json(Models { object: ListKind, data }))
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
    let Some(registry) = state.models() else {
        let served = state.ready()?;
        let id = model_name(id)?;
        served.check_name(&id, Some("model"))?;
        context::check_model(&served.name)?;
        return Ok(Json(Model::new(served)));
    };
    registry.check_open()?;
    let (id, entries) = (model_name(id)?, registry.entries());
    context::check_model(&id)?;
    if let Some(entry) = entries.iter().find(|entry| entry.name() == id) {
        return Ok(Json(Model::of(entry, registry)));
    }
    let names: Vec<&str> = entries.iter().map(|entry| entry.name()).filter(|name| context::may_use(name)).collect();
    Err(unknown_model(&id, &names, Some("model")))
}

fn model_name(id: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("model"), rejection.to_string()))?;
    Ok(id)
}

/// Check that the process responds
#[utoipa::path(
    get,
    path = "/livez",
    operation_id = "alive",
    tag = "service",
    responses((status = 200, description = "It does.", body = Health))
)]
pub(super) async fn alive() -> Json<Health> {
    Json(Health { status: HealthStatus })
}

/// Check that the default model is loaded and takes requests
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "health",
    tag = "service",
    responses((status = 200, description = "It does.", body = Health), Error<503>)
)]
pub(super) async fn health(State(state): State<AppState>) -> Result<Json<Health>, ApiError> {
    takes_requests(&state)?;
    Ok(Json(Health { status: HealthStatus }))
}

/// Check that the model is loaded, takes requests, and can store sessions
#[utoipa::path(
    get,
    path = "/ready",
    operation_id = "ready",
    tag = "service",
    responses((status = 200, description = "It does.", body = Readiness), Error<503>)
)]
pub(super) async fn ready(State(state): State<AppState>) -> Result<Json<Readiness>, ApiError> {
    readiness(&state).map(|()| Json(Readiness { status: ReadyStatus }))
}

/// Fails if the only or default model takes no requests. A default model that was unloaded to make room for others
/// counts as taking requests.
fn takes_requests(state: &AppState) -> Result<(), ApiError> {
    match state.models() {
        Some(models) => models.check_ready(),
        None => state.ready().map(drop),
    }
}

/// Checks that the server is ready, and returns the reason if it is not.
pub(super) fn readiness(state: &AppState) -> Result<(), ApiError> {
    takes_requests(state)?;
    let stores = match state.models() {
        Some(models) => models.all_stores(),
        None => state.store().ok().cloned().into_iter().collect(),
    };
    // Only readiness checks the stores: requests that store nothing still work.
    if let Some(failure) = stores.iter().find_map(Store::failure) {
        let message = format!("sessions cannot be stored: {failure}");
        return Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message));
    }
    Ok(())
}

/// Handles a request for an unknown path.
pub(super) async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    let nearest = request.extensions().get::<Arc<Description>>().and_then(|routes| routes.nearest(path));
    unknown_path(path, nearest)
}

/// Creates the error for a path without a route. The message suggests the route `nearest`, if there is one.
pub(super) fn unknown_path(path: &str, nearest: Option<&str>) -> ApiError {
    let nearest = nearest.map_or_else(String::new, |route| format!("; the nearest is {route}"));
    ApiError::request(StatusCode::NOT_FOUND, None, Some("not_found"), format!("no route matches {path}{nearest}"))
}

/// Handles a request with a method that the path does not support.
pub(super) async fn method_not_allowed(request: Request) -> ApiError {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let routes = request.extensions().get::<Arc<Description>>();
    let methods = path.zip(routes).map(|(path, routes)| routes.methods(path));
    // The admin address has no description, and only GET routes.
    let methods = methods.unwrap_or_else(|| "GET, HEAD".into());
    let message = format!("{} is not allowed here; this path takes {methods}", request.method());
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, None, Some("method_not_allowed"), message)
}
