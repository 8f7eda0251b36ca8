//! Parts of requests and responses that the routes of sessions share.

use axum::Json;
use axum::body::Bytes;
use axum::extract::Path;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use tracing::Instrument;

use super::wire::Session;
use crate::api::error::ApiError;
use crate::api::formats::json::body;
use crate::api::request::continuation::session_id;
use crate::api::state::{AppState, Served};
use crate::session::{self, SessionId};

/// A response with the session's version as its entity tag.
pub(super) fn tagged(status: StatusCode, version: &str, body: impl IntoResponse) -> Response {
    let mut response = (status, body).into_response();
    if let Ok(tag) = HeaderValue::try_from(format!("\"{version}\"")) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

pub(super) fn respond(served: &Served, status: StatusCode, session: &session::Session) -> Response {
    tagged(status, session.head.id.as_str(), Json(Session::new(session, served.state_bytes)))
}

/// A body that is stored in a receipt before it is sent.
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

/// A stored body as the response that it was the first time.
pub(super) fn replay(status: StatusCode, body: String) -> Response {
    let version = serde_json::from_str(&body).ok().and_then(|body: Value| Some(body["version"].as_str()?.to_owned()));
    let body = ([(header::CONTENT_TYPE, "application/json")], body);
    match version {
        Some(version) => tagged(status, &version, body),
        None => (status, body).into_response(),
    }
}

/// The session id in a path.
pub(super) fn path_id(path: Result<Path<String>, PathRejection>) -> Result<SessionId, ApiError> {
    let Path(id) = path.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    session_id(&id, "session")
}

/// A JSON body; an empty body counts as `{}`.
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
