//! `/v1/sessions` and `/v1/snapshots`: conversations as things to make, list, fork, rewind, read into, take away and
//! bring back.

mod read;
mod snapshots;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tracing::Instrument;

use super::error::ApiError;
use super::idempotency::{Attempt, attempt};
use super::origin::{if_match, session_id, version_id, wait};
use super::auth::owner::Caller;
use super::state::{AppState, Served};
use super::wire::{body, parse};
use crate::session::{Fork, Patch, Session, SessionId, Version, VersionId};
use wire::{Change, ListQuery, ttl};

pub(super) use read::{append, create};
pub(super) use snapshots::{download, upload};
pub(super) use wire::{AppendRequest, CreateRequest, ForkRequest, PatchRequest, RewindRequest, label, metadata};

/// Most sessions that one fork makes.
const MAX_FORKS: u64 = 1000;

/// Most sessions of one page.
const MAX_PAGE: u64 = 100;

/// A session as the API shows it.
fn json_of(session: &Session, state_bytes: u64) -> Value {
    let head = &session.head;
    let from = session.forked_from.as_ref();
    json!({
        "id": session.id.as_str(),
        "object": "session",
        "created": session.created,
        "updated": session.updated,
        "expires": session.expires,
        "ttl_seconds": session.ttl,
        "metadata": session.metadata,
        "version": head.id.as_str(),
        "parent": head.parent.as_ref().map(VersionId::as_str),
        "label": head.label,
        "tokens": head.tokens,
        "state_bytes": state_bytes,
        "in_use": session.in_use,
        "forked_from": from.map(|(id, version)| json!({"session": id.as_str(), "version": version.as_str()})),
    })
}

/// An answer that has one session, with its version as the entity tag.
fn one(status: StatusCode, version: &str, body: impl IntoResponse) -> Response {
    let mut response = (status, body).into_response();
    if let Ok(tag) = HeaderValue::try_from(format!("\"{version}\"")) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

fn answer(served: &Served, status: StatusCode, session: &Session) -> Response {
    one(status, session.head.id.as_str(), Json(json_of(session, served.state_bytes)))
}

/// Runs what must not be cut off half way, also where the client leaves: a change and the note that it was made.
async fn unbroken<T: Send + 'static>(
    state: &AppState,
    change: impl Future<Output = Result<T, ApiError>> + Send + 'static,
) -> Result<T, ApiError> {
    let guard = state.run_begins();
    let change = async move {
        let outcome = change.await;
        drop(guard);
        outcome
    };
    tokio::spawn(change.in_current_span()).await.unwrap_or_else(|_| Err(ApiError::internal()))
}

/// A body that was made before, as the answer that it was then.
fn again(status: StatusCode, body: String) -> Response {
    let version = serde_json::from_str(&body).ok().and_then(|body: Value| Some(body["version"].as_str()?.to_owned()));
    let body = ([(header::CONTENT_TYPE, "application/json")], body);
    match version {
        Some(version) => one(status, &version, body),
        None => (status, body).into_response(),
    }
}

/// The session that a path names.
fn named(path: Result<Path<String>, PathRejection>) -> Result<SessionId, ApiError> {
    let Path(id) = path.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    session_id(&id, "session")
}

/// A body of JSON, or none at all, which asks for nothing.
fn json_body(state: &AppState, headers: &HeaderMap, bytes: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    match bytes {
        Ok(bytes) if bytes.is_empty() => Ok(Bytes::from_static(b"{}")),
        bytes => body(headers, bytes, state.options().max_body_bytes),
    }
}

/// `GET /v1/sessions`
pub(super) async fn list(
    State(state): State<AppState>,
    Caller(owner): Caller,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
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
    let data: Vec<Value> = sessions.iter().map(|session| json_of(session, served.state_bytes)).collect();
    let id = |session: Option<&Session>| session.map(|session| session.id.as_str().to_owned());
    let (first, last) = (id(sessions.first()), id(sessions.last()));
    Ok(Json(json!({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})))
}

/// `GET /v1/sessions/{id}`
pub(super) async fn get(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let served = state.loaded()?;
    let session = state.store()?.get(owner, &named(id)?).await?;
    Ok(answer(served, StatusCode::OK, &session))
}

/// `PATCH /v1/sessions/{id}`
pub(super) async fn patch(
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
            Change::None => None,
            Change::Away => Some(None),
            Change::To(seconds) => Some(Some(ttl(seconds)?)),
        },
    };
    let served = state.ready()?;
    let session = state.store()?.update(owner, &named(id)?, patch).await?;
    Ok(answer(served, StatusCode::OK, &session))
}

/// `DELETE /v1/sessions/{id}`
pub(super) async fn delete(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let id = named(id)?;
    state.store()?.delete(owner, &id).await?;
    Ok(Json(json!({"id": id.as_str(), "object": "session.deleted", "deleted": true})))
}

/// `POST /v1/sessions/{id}/fork`
pub(super) async fn fork(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let (id, bytes) = (named(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/fork");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Again(body) => return Ok(again(StatusCode::CREATED, body)),
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
    let body = move |sessions: &[Session]| {
        let data: Vec<Value> = sessions.iter().map(|session| json_of(session, served.state_bytes)).collect();
        json!({"object": "list", "data": data}).to_string()
    };
    let fork = Fork { from, n: n as usize, metadata, ttl };
    let forking = async move {
        let promise = ticket.as_ref().map(|ticket| ticket.promise(body.clone()));
        let sessions = store.fork_once(owner, &id, fork, promise).await?;
        Ok(again(StatusCode::CREATED, body(&sessions)))
    };
    unbroken(&state, forking).await
}

/// `POST /v1/sessions/{id}/rewind`
pub(super) async fn rewind(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let id = named(id)?;
    let request: RewindRequest = parse(&json_body(&state, &headers, bytes)?)?;
    let to = version_id(&request.version, "version")?;
    let (served, wait) = (state.ready()?, wait(&headers)?);
    let _place = if wait.is_zero() { None } else { Some(state.waiter()?) };
    let session = state.store()?.rewind(owner, &id, &to, if_match(&headers)?, wait).await?;
    Ok(answer(served, StatusCode::OK, &session))
}

/// `GET /v1/sessions/{id}/turns`
pub(super) async fn turns(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let (id, store) = (named(id)?, state.store()?);
    let versions = store.versions(owner, &id).await?;
    // Asked for after the versions: a turn that ends meanwhile leaves them without a head, never with a wrong one.
    let head = store.get(owner, &id).await?.head.id;
    let turn = |version: &Version| {
        json!({
            "object": "turn",
            "version": version.id.as_str(),
            "parent": version.parent.as_ref().map(VersionId::as_str),
            "tokens": version.tokens,
            "time": version.time,
            "label": version.label,
            "kind": version.kind,
            "prompt_tokens": version.prompt_tokens,
            "completion_tokens": version.completion_tokens,
            "bytes": version.bytes,
            "kept": version.kept,
            "head": version.id == head,
        })
    };
    let data: Vec<Value> = versions.iter().map(turn).collect();
    Ok(Json(json!({"object": "list", "data": data, "has_more": false})))
}
