//! Reading a conversation back: its text, its tokens and its messages.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use axum::response::Response;

use super::http::{path_id, read_query, resolve, tagged};
use super::text_wire::{MessagesQuery, SessionMessages, SessionText, SessionTokens, TextKind, TextQuery, TokensKind};
use super::wire::ListKind;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::{Id, StoreErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::select::Model;
use crate::api::state::AppState;
use crate::session::{MessagesPart, Owner, SessionId, TextPart, VersionId};

/// Read the text of a session
///
/// What the model has read and generated up to a version: exactly the tokens from which the next turn continues. Text that is
/// held back because it may be the beginning of a stop string is included.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/text",
    operation_id = "readText",
    tag = "sessions",
    params(Id, TextQuery),
    responses((status = 200, description = "The text.", body = SessionText), StoreErrors)
)]
pub(super) async fn text(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<TextQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (id, version, part) = part(&state, owner, id, query).await?;
    let served = Arc::clone(state.loaded()?);
    let name = version.to_string();
    let body = run_blocking(&state, size_of_val(part.tokens.as_slice()), move || {
        let TextPart { total, start, end, tokens } = part;
        let text = decode(&served.tokenizer.vocabulary().text_of(&tokens, start == 0));
        Ok(SessionText { object: TextKind, id: id.to_string(), version: name, start, end, total, text })
    });
    Ok(tagged(StatusCode::OK, version.as_str(), Json(body.await?)))
}

/// Read the tokens of a session
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/tokens",
    operation_id = "readTokens",
    tag = "sessions",
    params(Id, TextQuery),
    responses((status = 200, description = "The tokens.", body = SessionTokens), StoreErrors)
)]
pub(super) async fn tokens(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<TextQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (id, version, TextPart { total, start, end, tokens }) = part(&state, owner, id, query).await?;
    let (object, id, name) = (TokensKind, id.to_string(), version.to_string());
    let body = SessionTokens { object, id, version: name, start, end, total, tokens };
    Ok(tagged(StatusCode::OK, version.as_str(), Json(body)))
}

/// Read the messages of a session
///
/// In order, from the first. The `instructions` of `/v1/responses` are a system message.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/messages",
    operation_id = "readMessages",
    tag = "sessions",
    params(Id, MessagesQuery),
    responses((status = 200, description = "The messages.", body = SessionMessages), StoreErrors)
)]
pub(super) async fn messages(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<MessagesQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    let MessagesQuery { version, start, end } = read_query(query)?;
    let version = meant(&state, owner, &id, version).await?;
    let vocabulary = Arc::clone(state.loaded()?.tokenizer.vocabulary());
    let found = state.store()?.messages(owner, &id, version.as_ref(), (start, end), vocabulary).await;
    let (version, MessagesPart { total, start, end, messages }) = found?;
    let data = messages.into_iter().map(Into::into).collect();
    let (object, name) = (ListKind, version.to_string());
    let body = SessionMessages { object, id: id.to_string(), version: name, start, end, total, data };
    Ok(tagged(StatusCode::OK, version.as_str(), Json(body)))
}

async fn part(
    state: &AppState,
    owner: Owner,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<TextQuery>, QueryRejection>,
) -> Result<(SessionId, VersionId, TextPart), ApiError> {
    let id = path_id(id)?;
    let TextQuery { version, start, end } = read_query(query)?;
    let version = meant(state, owner, &id, version).await?;
    let (version, part) = state.store()?.text(owner, &id, version.as_ref(), (start, end)).await?;
    Ok((id, version, part))
}

/// Returns the version that the query names by its id or a tag, if it names one.
async fn meant(
    state: &AppState,
    owner: Owner,
    id: &SessionId,
    version: Option<String>,
) -> Result<Option<VersionId>, ApiError> {
    match version {
        Some(version) => Ok(Some(resolve(state.store()?, owner, id, (&version, "version")).await?)),
        None => Ok(None),
    }
}

/// Decodes bytes as text; invalid UTF-8 becomes U+FFFD.
pub(super) fn decode(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
