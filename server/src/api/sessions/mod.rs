//! The routes `/v1/sessions` and `/v1/snapshots`: create, list, fork, rewind, extend, name, read, download and upload
//! sessions.

mod branches;
mod diff;
pub(super) mod http;
mod listing;
mod read;
pub(super) mod snapshots;
mod text;
mod text_wire;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, RawQuery};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::json::parse;
use crate::api::openapi::{BodyErrors, Error, Id, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, StoreErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::{if_match, wait};
use crate::api::run::retry::{Attempt, attempt};
use crate::api::select::Model;
use crate::api::state::AppState;
use crate::session::{self, Fork, Patch};
use http::{json_body, path_id, read_json, replay, resolve, respond, to_completion, to_json};
use listing::{ListQuery, MetadataQuery, Sessions, listing};
use wire::{
    Change, DeletedKind, DeletedSession, ForkRequest, ForkedSessions, ListKind, PatchRequest, RewindRequest, Session,
    Turns, Version, ttl,
};

pub(super) use wire::{MetadataField, label, metadata};

/// Most forks in one request.
const MAX_FORKS: u64 = 1000;

/// The routes of sessions and snapshots.
pub(super) fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(list, read::create))
        .routes(routes!(get, patch, delete))
        .routes(routes!(read::append))
        .routes(routes!(fork))
        .routes(routes!(rewind))
        .routes(routes!(turns))
        .routes(routes!(branches::label))
        .routes(routes!(branches::tags))
        .routes(routes!(branches::tag, branches::untag))
        .routes(routes!(branches::lineage))
        .routes(routes!(diff::diff))
        .routes(routes!(text::text))
        .routes(routes!(text::tokens))
        .routes(routes!(text::messages))
        .routes(routes!(snapshots::download))
        .routes(routes!(snapshots::upload))
}

/// List your sessions
///
/// On a server with several models, the sessions of one model.
///
/// Filters select sessions that match all of them. A request looks at 1,000 sessions at most: with filters, a page may
/// have fewer sessions than `limit`, or none, although `has_more` is true. `next` continues the search.
#[utoipa::path(
    get,
    path = "/v1/sessions",
    operation_id = "listSessions",
    tag = "sessions",
    params(ListQuery, MetadataQuery),
    responses((status = 200, description = "A page of sessions.", body = Sessions), StoreErrors)
)]
async fn list(
    Model(state): Model,
    Caller(owner): Caller,
    RawQuery(query): RawQuery,
) -> Result<Json<Sessions>, ApiError> {
    let (model, listing) = listing(query.as_deref().unwrap_or_default())?;
    let served = state.loaded()?;
    if let Some(model) = model {
        served.check_name(&model, Some("model"))?;
    }
    let page = state.store()?.list(owner, listing).await;
    let page = page.map_err(|error| ApiError::from(error).renamed("session", "after"))?;
    Ok(Json(Sessions::new(&page, served.state_bytes)))
}

/// Retrieve a session
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}",
    operation_id = "readSession",
    tag = "sessions",
    params(Id),
    responses(
        (status = 200, description = "The session.", body = Session),
        StoreErrors
    )
)]
async fn get(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let served = state.loaded()?;
    let session = state.store()?.get(owner, &path_id(id)?).await?;
    Ok(respond(served, StatusCode::OK, &session))
}

/// Change a session's metadata, its lifetime, or the label of its version
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
        (status = 200, description = "The session.", body = Session),
        StoreErrors,
        BodyErrors
    )
)]
async fn patch(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let request: PatchRequest = read_json(&state, &headers, bytes).await?;
    let patch = Patch {
        metadata: request.metadata.map(metadata).transpose()?,
        ttl: match request.ttl_seconds {
            Change::Keep => None,
            Change::Clear => Some(None),
            Change::Set(seconds) => Some(Some(ttl(seconds)?)),
        },
        label: match request.label {
            Change::Keep => None,
            Change::Clear => Some(None),
            Change::Set(name) => Some(label(Some(name))?),
        },
    };
    let served = state.ready()?;
    let session = state.store()?.update(owner, &path_id(id)?, patch).await?;
    Ok(respond(served, StatusCode::OK, &session))
}

/// Delete a session
///
/// A turn that is running ends at once with an error, and is not committed.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    operation_id = "deleteSession",
    tag = "sessions",
    params(Id),
    responses((status = 200, description = "The session is deleted.", body = DeletedSession), StoreErrors, Error<409>)
)]
async fn delete(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<DeletedSession>, ApiError> {
    let id = path_id(id)?;
    state.store()?.delete(owner, &id).await?;
    state.active_runs().session_deleted(&id);
    Ok(Json(DeletedSession { id: id.to_string(), object: DeletedKind, deleted: true }))
}

/// Fork a session
///
/// Works while the session is in use, too: the fork then starts from the last commit.
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
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let (id, bytes) = (path_id(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/fork");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Retry(body, _) => return Ok(replay(StatusCode::CREATED, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let request: ForkRequest = run_blocking(&state, bytes.len(), move || parse(&bytes)).await?;
    let n = request.n.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&n) {
        return Err(ApiError::invalid(Some("n"), format!("n must be from 1 to {MAX_FORKS}, found {n}")));
    }
    let (metadata, ttl) = (request.metadata.map(metadata).transpose()?, request.ttl_seconds.map(ttl).transpose()?);
    let (served, store) = (Arc::clone(state.ready()?), state.store()?.clone());
    let from = match &request.version {
        Some(version) => Some(resolve(&store, owner, &id, (version, "version")).await?),
        None => None,
    };
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
///
/// The version may be any of yours whose snapshot is kept, for example the head of the best fork. The session then
/// lists that version with its ancestors.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/rewind",
    operation_id = "rewindSession",
    tag = "sessions",
    params(Id, IfMatch, Prefer),
    request_body = RewindRequest,
    responses(
        (status = 200, description = "The session.", body = Session),
        StoreErrors,
        BodyErrors,
        Error<409>,
        Error<412>,
        Error<507>
    )
)]
async fn rewind(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    let request: RewindRequest = read_json(&state, &headers, bytes).await?;
    let to = resolve(state.store()?, owner, &id, (&request.version, "version")).await?;
    let (served, wait) = (state.ready()?, wait(&headers)?);
    let _permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
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
    Model(state): Model,
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
