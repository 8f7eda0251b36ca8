//! Helpers for requests and responses that the session routes share.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tracing::Instrument;

use super::wire::Session;
use crate::api::error::ApiError;
use crate::api::formats::json::{body, parse};
use crate::api::formats::wording::data_complaint;
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::session_id;
use crate::api::run::version;
use crate::api::state::{AppState, Served};
use crate::session::{self, Owner, SessionId, Store, VersionId, VersionRef};

/// Returns a response with the session's version in its headers.
pub(super) fn tagged(status: StatusCode, version: &str, body: impl IntoResponse) -> Response {
    version::tagged((status, body).into_response(), Some(version))
}

pub(super) fn respond(served: &Served, status: StatusCode, session: &session::Session) -> Response {
    tagged(status, session.head.id.as_str(), Json(Session::new(session, served.state_bytes)))
}

/// Serializes a body that is stored in a receipt before it is sent.
pub(super) fn to_json(body: &impl Serialize) -> String {
    serde_json::to_string(body).expect("strings, numbers and maps with string keys become JSON")
}

/// Completes a change and its receipt even if the client disconnects.
pub(super) async fn to_completion<T: Send + 'static>(
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

/// Turns a stored body back into the original response.
pub(super) fn replay(status: StatusCode, body: String) -> Response {
    let version = serde_json::from_str(&body).ok().and_then(|body: Value| Some(body["version"].as_str()?.to_owned()));
    let body = ([(header::CONTENT_TYPE, "application/json")], body);
    match version {
        Some(version) => tagged(status, &version, body),
        None => (status, body).into_response(),
    }
}

/// Parses the session id in a path.
pub(super) fn path_id(path: Result<Path<String>, PathRejection>) -> Result<SessionId, ApiError> {
    let Path(id) = path.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    session_id(&id, "session")
}

/// Returns the version of a session that `text` names: by its id, or by a tag of the session. `param` is the
/// parameter's name.
pub(super) async fn resolve(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    (text, param): (&str, &str),
) -> Result<VersionId, ApiError> {
    let meant = VersionRef::parse(text).ok_or_else(|| ApiError::missing(param, "version"))?;
    store.resolve(owner, id, meant).await.map_err(|error| ApiError::from(error).renamed("tag", param))
}

/// Returns the version that `text` names anywhere: if it is a session's id, that id and the head of the session; else
/// what [`resolve`] finds in the session `id`.
pub(super) async fn resolve_any(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    (text, param): (&str, &str),
) -> Result<(Option<SessionId>, VersionId), ApiError> {
    let Some(other) = SessionId::parse(text) else {
        return Ok((None, resolve(store, owner, id, (text, param)).await?));
    };
    let found = store.get(owner, &other).await;
    let head = found.map_err(|error| ApiError::from(error).renamed("session", param))?.head.id;
    Ok((Some(other), head))
}

/// Returns the query parameters, or an error that names the parameter at fault.
pub(in crate::api) fn read_query<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, ApiError> {
    query.map(|Query(query)| query).map_err(|rejection| {
        let text = rejection.body_text();
        let message = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        // The message is about a wrong or missing name, or it has a parameter's name and what is wrong with its value.
        match message.split_once(": ").filter(|_| !message.contains(" field `")) {
            Some((param, message)) => ApiError::invalid(Some(param), data_complaint(param, message)),
            None => ApiError::invalid(message.split('`').nth(1), data_complaint("the query", message)),
        }
    })
}

/// Parses a JSON body; an empty body counts as `{}`.
pub(in crate::api) async fn read_json<T: DeserializeOwned + Send + 'static>(
    state: &AppState,
    headers: &HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<T, ApiError> {
    let bytes = json_body(state, headers, bytes)?;
    run_blocking(state, bytes.len(), move || parse(&bytes)).await
}

/// Returns a JSON body; an empty body counts as `{}`.
pub(super) fn json_body(
    state: &AppState,
    headers: &HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Bytes, ApiError> {
    match bytes {
        Ok(bytes) if bytes.is_empty() => Ok(Bytes::from_static(b"{}")),
        bytes => body(headers, bytes, state.options().max_body_bytes),
    }
}
