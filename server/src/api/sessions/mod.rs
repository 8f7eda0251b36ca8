//! `/v1/sessions` and `/v1/snapshots`: creating, listing, forking, rewinding, extending, downloading and uploading
//! sessions.

mod http;
mod read;
mod snapshots;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::json::parse;
use crate::api::openapi::{BodyErrors, Error, Id, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, StoreErrors};
use crate::api::request::continuation::{if_match, session_id, version_id, wait};
use crate::api::run::retry::{Attempt, attempt};
use crate::api::state::AppState;
use crate::session::{self, Fork, Patch};
use http::{json_body, path_id, replay, respond, to_completion, to_json};
use wire::{
    Change, DeletedKind, DeletedSession, ForkRequest, ForkedSessions, ListKind, ListQuery, PatchRequest, RewindRequest,
    Session, Sessions, Turns, Version, ttl,
};

pub(super) use wire::{label, metadata};

/// Most forks in one request.
const MAX_FORKS: u64 = 1000;

/// Most sessions in one page.
const MAX_PAGE: u64 = 100;

/// The routes of sessions and snapshots.
pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list, read::create))
        .routes(routes!(get, patch, delete))
        .routes(routes!(read::append))
        .routes(routes!(fork))
        .routes(routes!(rewind))
        .routes(routes!(turns))
        .routes(routes!(snapshots::download))
        .routes(routes!(snapshots::upload))
}

/// List your sessions
#[utoipa::path(
    get,
    path = "/v1/sessions",
    operation_id = "listSessions",
    tag = "sessions",
    params(ListQuery),
    responses((status = 200, description = "A page of sessions.", body = Sessions), StoreErrors)
)]
async fn list(
    State(state): State<AppState>,
    Caller(owner): Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Sessions>, ApiError> {
    let Query(query) = query.map_err(|rejection| ApiError::invalid(None, rejection.body_text()))?;
    let limit = query.limit.unwrap_or(20);
    if !(1..=MAX_PAGE).contains(&limit) {
        let message = format!("limit must be from 1 to {MAX_PAGE}, found {limit}");
        return Err(ApiError::invalid(Some("limit"), message));
    }
    let newest_first = match query.order.as_deref() {
        None | Some("desc") => true,
        Some("asc") => false,
        Some(other) => {
            return Err(ApiError::invalid(Some("order"), format!("order must be asc or desc, found {other:?}")));
        }
    };
    let served = state.loaded()?;
    let after = query.after.map(|id| session_id(&id, "after")).transpose()?;
    let page = state.store()?.list(owner, after, limit as usize, newest_first).await;
    let (sessions, more) = page.map_err(|error| ApiError::from(error).renamed("session", "after"))?;
    let data = sessions.iter().map(|session| Session::new(session, served.state_bytes)).collect();
    Ok(Json(Sessions::new(data, more)))
}

/// Retrieve a session
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}",
    operation_id = "readSession",
    tag = "sessions",
    params(Id),
    responses(
        (status = 200, description = "The session.", body = Session,
            headers(("etag" = String, description = "The session's version."))),
        StoreErrors
    )
)]
async fn get(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let served = state.loaded()?;
    let session = state.store()?.get(owner, &path_id(id)?).await?;
    Ok(respond(served, StatusCode::OK, &session))
}

/// Change a session's metadata or lifetime
#[utoipa::path(
    patch,
    path = "/v1/sessions/{id}",
    operation_id = "changeSession",
    tag = "sessions",
    params(Id),
    request_body(content = Option<PatchRequest>, examples(
        ("metadata" = (value = json!({"metadata": {"tale": "crow"}}))),
        ("no expiry" = (value = json!({"ttl_seconds": null})))
    )),
    responses(
        (status = 200, description = "The session.", body = Session,
            headers(("etag" = String, description = "The session's version."))),
        StoreErrors,
        BodyErrors
    )
)]
async fn patch(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let request: PatchRequest = parse(&json_body(&state, &headers, bytes)?)?;
    let patch = Patch {
        metadata: request.metadata.map(metadata).transpose()?,
        ttl: match request.ttl_seconds {
            Change::Keep => None,
            Change::Clear => Some(None),
            Change::Set(seconds) => Some(Some(ttl(seconds)?)),
        },
    };
    let served = state.ready()?;
    let session = state.store()?.update(owner, &path_id(id)?, patch).await?;
    Ok(respond(served, StatusCode::OK, &session))
}

/// Delete a session
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    operation_id = "deleteSession",
    tag = "sessions",
    params(Id),
    responses((status = 200, description = "The session is deleted.", body = DeletedSession), StoreErrors, Error<409>)
)]
async fn delete(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<DeletedSession>, ApiError> {
    let id = path_id(id)?;
    state.store()?.delete(owner, &id).await?;
    Ok(Json(DeletedSession { id: id.to_string(), object: DeletedKind, deleted: true }))
}

/// Fork a session
///
/// Also works while the session is in use, from its last commit.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/fork",
    operation_id = "forkSession",
    tag = "sessions",
    params(Id, IdempotencyKey),
    request_body(content = Option<ForkRequest>, examples(
        ("one" = (value = json!({}))),
        ("three" = (value = json!({"n": 3, "metadata": {"tale": "fox"}})))
    )),
    responses(
        (status = 201, description = "The new sessions.", body = ForkedSessions),
        StoreErrors,
        BodyErrors,
        IdempotencyErrors,
        Error<507>
    )
)]
async fn fork(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let (id, bytes) = (path_id(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/fork");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Retry(body) => return Ok(replay(StatusCode::CREATED, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let request: ForkRequest = parse(&bytes)?;
    let n = request.n.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&n) {
        return Err(ApiError::invalid(Some("n"), format!("n must be from 1 to {MAX_FORKS}, found {n}")));
    }
    let from = request.version.map(|id| version_id(&id, "version")).transpose()?;
    let (metadata, ttl) = (request.metadata.map(metadata).transpose()?, request.ttl_seconds.map(ttl).transpose()?);
    let (served, store) = (Arc::clone(state.ready()?), state.store()?.clone());
    let body = move |sessions: &[session::Session]| {
        let data = sessions.iter().map(|session| Session::new(session, served.state_bytes)).collect();
        to_json(&ForkedSessions { object: ListKind, data })
    };
    let fork = Fork { from, n: n as usize, metadata, ttl };
    let forking = async move {
        let promise = ticket.as_ref().map(|ticket| ticket.promise(body.clone()));
        let sessions = store.fork(owner, &id, fork, promise).await?;
        Ok(replay(StatusCode::CREATED, body(&sessions)))
    };
    to_completion(&state, forking).await
}

/// Rewind to an earlier version, or switch to another branch
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/rewind",
    operation_id = "rewindSession",
    tag = "sessions",
    params(Id, IfMatch, Prefer),
    request_body = RewindRequest,
    responses(
        (status = 200, description = "The session.", body = Session,
            headers(("etag" = String, description = "The session's version."))),
        StoreErrors,
        BodyErrors,
        Error<409>,
        Error<412>,
        Error<507>
    )
)]
async fn rewind(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    let request: RewindRequest = parse(&json_body(&state, &headers, bytes)?)?;
    let to = version_id(&request.version, "version")?;
    let (served, wait) = (state.ready()?, wait(&headers)?);
    let _permit = if wait.is_zero() { None } else { Some(state.waiter()?) };
    let session = state.store()?.rewind(owner, &id, &to, if_match(&headers)?, wait).await?;
    Ok(respond(served, StatusCode::OK, &session))
}

/// List the versions of a session
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/turns",
    operation_id = "listTurns",
    tag = "sessions",
    params(Id),
    responses(
        (status = 200, description = "The versions, oldest first, including those that a rewind left.", body = Turns),
        StoreErrors
    )
)]
async fn turns(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Turns>, ApiError> {
    let (id, store) = (path_id(id)?, state.store()?);
    let versions = store.versions(owner, &id).await?;
    // Read after the versions: if a turn ends in between, the list has no head instead of a wrong one.
    let head = store.get(owner, &id).await?.head.id;
    let data = versions.into_iter().map(|version| Version::new(version, &head)).collect();
    Ok(Json(Turns { object: ListKind, data, has_more: false }))
}
