//! Snapshots as files: downloaded from one server, uploaded to another.

use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;

use super::http::{path_id, read_query, resolve, respond, tagged};
use super::wire::{Session, SnapshotQuery, label, metadata};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::json::{check_encoding, declared_length};
use crate::api::openapi::{BodyErrors, Bytes, Error, Id, StoreErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::select::Model;
use crate::api::state::AppState;
use crate::session::{Conversation, NewSession, Owner, Snapshot, Start, Version};

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
                ("x-session-version" = String, description = "The same without quotes."),
                ("content-disposition" = String, description = "A file name.")
            )),
        StoreErrors
    )
)]
pub(super) async fn download(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<SnapshotQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    let query = read_query(query)?;
    let store = state.store()?;
    let version = match &query.version {
        Some(version) => Some(resolve(store, owner, &id, (version, "version")).await?),
        None => None,
    };
    let vocabulary = Arc::clone(state.loaded()?.tokenizer.vocabulary());
    let (version, bytes) = store.bytes(owner, &id, version.as_ref(), vocabulary).await?;
    Ok(file(&version, bytes))
}

/// Returns a response with a snapshot as a file.
pub(in crate::api) fn file(version: &Version, bytes: bytes::Bytes) -> Response {
    let name = format!("attachment; filename=\"{}.tidegate\"", version.id);
    let headers = [(header::CONTENT_TYPE, "application/octet-stream".to_owned()), (header::CONTENT_DISPOSITION, name)];
    tagged(StatusCode::OK, version.id.as_str(), (headers, bytes))
}

/// Upload a conversation
///
/// Creates a session from a snapshot of the same model, made by this or another server, with the label, metadata,
/// ancestors and text in the file.
#[utoipa::path(
    post,
    path = "/v1/snapshots",
    operation_id = "uploadSnapshot",
    tag = "sessions",
    request_body(content = inline(Bytes), content_type = "application/octet-stream"),
    responses(
        (status = 201, description = "The new session.", body = Session),
        BodyErrors,
        Error<501>,
        Error<503>,
        Error<507>
    )
)]
pub(super) async fn upload(
    Model(state): Model,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (snapshot, conversation, _) = receive(&state, owner, &headers, body).await?;
    let (metadata, label) = (metadata(conversation.metadata.clone())?, label(conversation.label.clone())?);
    let start = Start::Uploaded(Arc::new(snapshot), conversation);
    let new = NewSession { start, metadata, ttl: None, label };
    let session = state.store()?.create(owner, new).await?;
    Ok(respond(state.ready()?, StatusCode::CREATED, &session))
}

/// Whether the headers declare the body as a file.
pub(in crate::api) fn is_file(headers: &HeaderMap) -> bool {
    let essence = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    essence.is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/octet-stream"))
}

/// Receives the file of a snapshot, and returns its size as well.
pub(in crate::api) async fn receive(
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
    body: Body,
) -> Result<(Snapshot, Conversation, usize), ApiError> {
    let served = Arc::clone(state.ready()?);
    if !is_file(headers) {
        let message = "content-type must be application/octet-stream";
        return Err(ApiError::request(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, None, message));
    }
    check_encoding(headers)?;
    let most = served.codec.max_file_bytes();
    let long = || {
        let message = format!("the body must be at most {most} bytes long, the size of this model's snapshots");
        ApiError::request(StatusCode::PAYLOAD_TOO_LARGE, None, None, message)
    };
    if declared_length(headers).is_some_and(|length| length > most) {
        return Err(long());
    }
    let store = state.store()?;
    store.admit(owner).await?;
    let bytes = to_bytes(body, most).await.map_err(|_| long())?;
    let (codec, size) = (Arc::clone(&served.codec), bytes.len());
    let file = run_blocking(state, size, move || {
        codec.import(&bytes).map_err(|error| ApiError::invalid(Some("snapshot"), error.to_string()))
    });
    let (snapshot, conversation) = file.await?;
    Ok((snapshot, conversation, size))
}
