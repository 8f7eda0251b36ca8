//! llama.cpp's slots as sessions. A slot is a session of the caller, whose id is derived from the slot's number. A
//! saved slot is a session whose id is derived from the file name. So saving and restoring copy a pointer to a version,
//! and no state.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;
use super::slot::{MAX_SLOT, SlotId, new};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::{BodyErrors, Bytes as AnyBytes, Error, Prefer, StoreErrors};
use crate::api::request::continuation::wait;
use crate::api::select::Model;
use crate::api::sessions::http::{read_json, read_query};
use crate::api::sessions::snapshots::{file, receive};
use crate::api::state::AppState;
use crate::session::{Metadata, Owner, Session, SessionId, Start, StoreError};

/// The longest file name, in bytes.
const MAX_NAME: usize = 128;

/// The metadata key that says which file a session is.
const FILE: &str = "llama.cpp file";

/// Reads the slot number in a path.
fn path_slot(path: Result<Path<String>, PathRejection>) -> Result<SlotId, ApiError> {
    let Path(id) = path.map_err(|rejection| ApiError::invalid(Some("id_slot"), rejection.to_string()))?;
    // `parse` alone accepts a sign.
    let number = id.bytes().all(|byte| byte.is_ascii_digit()).then(|| id.parse().ok()).flatten().ok_or_else(|| {
        let found: String = id.chars().take(100).collect();
        let message = format!("id_slot must be a whole number from 0 to {MAX_SLOT}, found {found:?}");
        ApiError::invalid(Some("id_slot"), message)
    })?;
    SlotId::new(number)
}

/// What to do with a slot.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = SlotAction)]
pub(in crate::api) enum Action {
    Save,
    Restore,
    Erase,
}

/// The parameters of an action.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct ActionQuery {
    /// What to do with the slot.
    #[param(inline)]
    action: Action,
    /// The model that the slot belongs to, as in `/v1/models`. Default: the first one.
    #[param(nullable = false)]
    model: Option<String>,
}

/// The body of a request to save or restore a slot.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = SlotFile)]
pub(in crate::api) struct FileRequest {
    /// A name, not a path: letters, digits, `.`, `_` and `-`, not beginning with a dot. Required to save and to
    /// restore.
    #[schema(pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
    filename: Option<String>,
}

impl FileRequest {
    /// Checks the name, if there is one, and returns it.
    fn name(self) -> Result<Option<String>, ApiError> {
        let Some(name) = self.filename else { return Ok(None) };
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.') {
            return Ok(Some(name));
        }
        let found: String = name.chars().take(MAX_NAME).collect();
        let message = format!(
            "filename must be 1 to {MAX_NAME} letters, digits, dots, _ and -, and begin with no dot, found {found:?}: it is a \
             name, not a path"
        );
        Err(ApiError::invalid(Some("filename"), message))
    }
}

/// How long saving took.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct SaveTimings {
    save_ms: f64,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct RestoreTimings {
    restore_ms: f64,
}

/// A slot that was saved.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct SlotSave {
    id_slot: u64,
    filename: String,
    /// Tokens of its text.
    n_saved: u64,
    /// Bytes of its state, which are not copied.
    n_written: u64,
    timings: SaveTimings,
}

/// A slot that was restored.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct SlotRestore {
    id_slot: u64,
    filename: String,
    /// Tokens of its text.
    n_restored: u64,
    /// Bytes of its state, which are not copied.
    n_read: u64,
    timings: RestoreTimings,
}

/// A slot that was erased.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct Erased {
    id_slot: u64,
    /// Tokens of its text.
    n_erased: u64,
}

/// A slot whose state was replaced.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct Imported {
    id_slot: u64,
    /// Tokens of its text.
    n_restored: u64,
    /// Bytes of the body.
    n_read: u64,
}

/// The result of an action.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = SlotResult)]
pub(in crate::api) enum Outcome {
    Saved(SlotSave),
    Restored(SlotRestore),
    Erased(Erased),
}

/// Save, restore or erase a slot in llama.cpp's format
///
/// A slot holds the conversation of the requests to `/completion` with its `id_slot`. It is saved under a name that the
/// caller chooses, never to a path.
#[utoipa::path(
    post,
    path = "/slots/{id_slot}",
    operation_id = "slotAction",
    tag = "other formats",
    params(("id_slot" = u64, Path, maximum = 65_535, description = "The slot's number."), ActionQuery, Prefer),
    request_body(content = Option<FileRequest>, examples(("a file" = (value = json!({"filename": "fox.bin"}))))),
    responses(
        (status = 200, description = "What was done.", body = Outcome),
        StoreErrors<ErrorBody<'_>>,
        BodyErrors<ErrorBody<'_>>,
        Error<409, ErrorBody<'_>>,
        Error<507, ErrorBody<'_>>
    )
)]
pub(in crate::api) async fn act(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ActionQuery>, QueryRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<Outcome>, ApiError> {
    let (slot, ActionQuery { action, model }) = (path_slot(id)?, read_query(query)?);
    let started = Instant::now();
    let served = state.ready()?;
    if let Some(model) = &model {
        served.check_name(model, Some("model"))?;
    }
    let (store, wait) = (state.store()?, wait(&headers)?);
    let request: FileRequest = read_json(&state, &headers, bytes).await?;
    let filename = request.name()?;
    if let Action::Erase = action {
        let n_erased = match content(&state, owner, slot).await {
            Ok(session) => session.head.tokens,
            // An empty slot has nothing to erase.
            Err(error) if error.status() == StatusCode::NOT_FOUND => 0,
            Err(error) => return Err(error),
        };
        let id = slot.session(owner);
        match store.delete(owner, &id).await {
            Ok(()) => state.active_runs().session_deleted(&id),
            Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        return Ok(Json(Outcome::Erased(Erased { id_slot: slot.number(), n_erased })));
    }
    let filename = filename.ok_or_else(|| ApiError::invalid(Some("filename"), "filename must be given".to_owned()))?;
    let _permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
    let file = SessionId::named(owner, FILE, &filename);
    let millis = |started: Instant| started.elapsed().as_micros() as f64 / 1e3;
    let id_slot = slot.number();
    Ok(Json(if let Action::Save = action {
        let head = content(&state, owner, slot).await?.head;
        let new = new(Start::Version(head.id), Metadata::from([(FILE.to_owned(), filename.clone())]));
        store.create_as(owner, &file, new, wait).await?;
        let timings = SaveTimings { save_ms: millis(started) };
        Outcome::Saved(SlotSave { id_slot, filename, n_saved: head.tokens, n_written: head.bytes, timings })
    } else {
        let head = match store.get(owner, &file).await {
            Err(StoreError::NotFound { .. }) => return Err(ApiError::missing("filename", "saved slot")),
            session => session?.head,
        };
        store.create_as(owner, &slot.session(owner), new(Start::Version(head.id), slot.metadata()), wait).await?;
        let timings = RestoreTimings { restore_ms: millis(started) };
        Outcome::Restored(SlotRestore { id_slot, filename, n_restored: head.tokens, n_read: head.bytes, timings })
    }))
}

/// Returns the session of a slot, which must hold something.
async fn content(state: &AppState, owner: Owner, slot: SlotId) -> Result<Session, ApiError> {
    match state.store()?.get(owner, &slot.session(owner)).await {
        Ok(session) if session.head.tokens > 0 => Ok(session),
        Ok(_) | Err(StoreError::NotFound { .. }) => {
            let message = format!("slot {} holds nothing: no request has used it", slot.number());
            Err(ApiError::request(StatusCode::NOT_FOUND, Some("id_slot"), Some("not_found"), message))
        }
        Err(error) => Err(error.into()),
    }
}

/// Export the state of a slot
///
/// Returns the file that `PUT` takes, on any server with the same model. It is also a snapshot for `/v1/snapshots`.
#[utoipa::path(
    get,
    path = "/slots/{id_slot}/state",
    operation_id = "exportSlot",
    tag = "other formats",
    params(("id_slot" = u64, Path, maximum = 65_535, description = "The slot's number.")),
    responses(
        (status = 200, description = "The state.", body = inline(AnyBytes), content_type = "application/octet-stream",
            headers(
                ("etag" = String, description = "The version of the slot's session."),
                ("x-session-version" = String, description = "The same without quotes."),
                ("content-disposition" = String, description = "A file name.")
            )),
        StoreErrors<ErrorBody<'_>>
    )
)]
pub(in crate::api) async fn export(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let slot = path_slot(id)?;
    let session = content(&state, owner, slot).await?;
    let vocabulary = Arc::clone(state.loaded()?.tokenizer.vocabulary());
    let (version, bytes) = state.store()?.bytes(owner, &session.id, Some(&session.head.id), vocabulary).await?;
    Ok(file(&version, bytes))
}

/// Import the state of a slot
///
/// Replaces what the slot holds with a state that `GET` returned, on this server or another one with the same model.
#[utoipa::path(
    put,
    path = "/slots/{id_slot}/state",
    operation_id = "importSlot",
    tag = "other formats",
    params(("id_slot" = u64, Path, maximum = 65_535, description = "The slot's number."), Prefer),
    request_body(content = inline(AnyBytes), content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "The slot has the state.", body = Imported),
        BodyErrors<ErrorBody<'_>>,
        Error<409, ErrorBody<'_>>,
        Error<501, ErrorBody<'_>>,
        Error<503, ErrorBody<'_>>,
        Error<507, ErrorBody<'_>>
    )
)]
pub(in crate::api) async fn import(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (slot, wait) = (path_slot(id)?, wait(&headers)?);
    // The permit comes before the body is read, because a request that waits holds its body in memory.
    let _permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
    let (snapshot, conversation, read) = receive(&state, owner, &headers, body).await?;
    let n_restored = snapshot.tokens();
    let new = new(Start::Uploaded(Arc::new(snapshot), conversation), slot.metadata());
    state.store()?.create_as(owner, &slot.session(owner), new, wait).await?;
    Ok(Json(Imported { id_slot: slot.number(), n_restored, n_read: read as u64 }).into_response())
}
