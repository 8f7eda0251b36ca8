//! Snapshots as files: downloaded from one server, uploaded to another.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;

use super::http::{path_id, respond, tagged};
use super::wire::{Session, SnapshotQuery};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::{BodyErrors, Bytes, Error, Id, StoreErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::version_id;
use crate::api::state::AppState;
use crate::session::{Metadata, NewSession, Start};

/// Download a conversation as a file
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/snapshot",
    operation_id = "downloadSnapshot",
    tag = "sessions",
    params(Id, SnapshotQuery),
    responses(
        (status = 200, description = "The snapshot.", body = inline(Bytes), content_type = "application/octet-stream",
            headers(
                ("etag" = String, description = "The session's version."),
                ("content-disposition" = String, description = "A file name.")
            )),
        StoreErrors
    )
)]
pub(super) async fn download(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<SnapshotQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    let Query(query) = query.map_err(|rejection| ApiError::invalid(None, rejection.body_text()))?;
    let version = query.version.map(|id| version_id(&id, "version")).transpose()?;
    let (version, bytes) = state.store()?.bytes(owner, &id, version.as_ref()).await?;
    let name = format!("attachment; filename=\"{}.tidegate\"", version.id);
    let headers = [(header::CONTENT_TYPE, "application/octet-stream".to_owned()), (header::CONTENT_DISPOSITION, name)];
    Ok(tagged(StatusCode::OK, version.id.as_str(), (headers, bytes)))
}

/// Upload a conversation
///
/// Creates a session from a snapshot of the same model, from this or another server.
#[utoipa::path(
    post,
    path = "/v1/snapshots",
    operation_id = "uploadSnapshot",
    tag = "sessions",
    request_body(content = inline(Bytes), content_type = "application/octet-stream"),
    responses(
        (status = 201, description = "The new session.", body = Session,
            headers(("etag" = String, description = "The session's version."))),
        BodyErrors,
        Error<501>,
        Error<503>,
        Error<507>
    )
)]
pub(super) async fn upload(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let served = Arc::clone(state.ready()?);
    let essence = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if essence.is_none_or(|essence| !essence.trim().eq_ignore_ascii_case("application/octet-stream")) {
        let message = "content-type must be application/octet-stream";
        return Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, None, message));
    }
    let most = served.codec.max_encoded_bytes();
    let long = || {
        let message = format!("the body must be at most {most} bytes long, the size of this model's snapshots");
        ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, None, None, message)
    };
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|length| length > most) {
        return Err(long());
    }
    let store = state.store()?;
    store.admit(owner).await?;
    let bytes = to_bytes(body, most).await.map_err(|_| long())?;
    let codec = Arc::clone(&served.codec);
    let snapshot = run_blocking(&state, move || {
        codec.import(&bytes).map_err(|error| ApiError::invalid(Some("snapshot"), error.to_string()))
    });
    let start = Start::Snapshot(Arc::new(snapshot.await?));
    let new = NewSession { start, metadata: Metadata::new(), ttl: None, label: None };
    let session = store.create(owner, new).await?;
    Ok(respond(&served, StatusCode::CREATED, &session))
}
