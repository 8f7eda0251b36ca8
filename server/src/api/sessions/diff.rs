//! Compares the texts of two versions.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::http::{path_id, read_query, resolve_any};
use super::text::decode;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::literals::literals;
use crate::api::openapi::{Id, StoreErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::select::Model;
use crate::session::{ChainFrom, Owner, PartedTexts, SessionId, Store, StoreError, VersionId};
use crate::text::{Edit, TooDifferent, Vocabulary, diff as diff_texts};

literals!(DiffKind = "session.diff");

/// Most tokens by which the comparison begins before the first difference, so that it begins at a word.
const MAX_BACK: usize = 64;

/// Number of tokens to look at on each side of a position for the nearest byte of text.
const NEAR: usize = 8;

/// The texts to compare.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DiffQuery {
    /// The first text: a version of yours, a tag of this session, or another session, which stands for its head.
    from: String,
    /// The second text, named in the same way. Default: the head of this session.
    #[param(nullable = false)]
    to: Option<String>,
}

/// The changes that turn one text into another.
#[derive(Serialize, ToSchema)]
pub(super) struct SessionDiff {
    object: DiffKind,
    /// The session.
    id: String,
    /// The version with the first text.
    from: String,
    /// The version with the second text.
    to: String,
    /// Number of tokens that both texts begin with. They are not in `changes`.
    common_tokens: u64,
    /// The newest version that both continue; null if there is none, if it is no longer listed, or if it is too far
    /// back.
    #[schema(required)]
    common_ancestor: Option<String>,
    /// The pieces of both texts after those tokens, in order; empty if the texts are the same.
    changes: Vec<TextChange>,
}

/// A piece of text.
#[derive(Serialize, ToSchema)]
pub(super) struct TextChange {
    /// Which text has the piece: both (`equal`), only the first (`delete`) or only the second (`insert`).
    #[schema(inline)]
    op: TextOp,
    text: String,
}

#[derive(Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum TextOp {
    Equal,
    Delete,
    Insert,
}

impl From<(Edit, String)> for TextChange {
    fn from((edit, text): (Edit, String)) -> Self {
        let op = match edit {
            Edit::Equal => TextOp::Equal,
            Edit::Delete => TextOp::Delete,
            Edit::Insert => TextOp::Insert,
        };
        Self { op, text }
    }
}

/// Compare the texts of two versions
///
/// Word by word, after the tokens that both begin with. The text before that is the same in both versions, up to
/// `common_tokens`.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/diff",
    operation_id = "diffTexts",
    tag = "sessions",
    params(Id, DiffQuery),
    responses((status = 200, description = "The differences.", body = SessionDiff), StoreErrors)
)]
pub(super) async fn diff(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<DiffQuery>, QueryRejection>,
) -> Result<Json<SessionDiff>, ApiError> {
    let id = path_id(id)?;
    let DiffQuery { from, to } = read_query(query)?;
    let store = state.store()?;
    let head = store.get(owner, &id).await?.head.id;
    let from = listed(store, owner, &id, (&from, "from")).await?;
    let to = match to {
        Some(to) => listed(store, owner, &id, (&to, "to")).await?,
        None => head,
    };
    let common_ancestor = match store.common_ancestor(owner, from.clone(), to.clone()).await {
        // The texts can be compared without a common ancestor.
        Err(StoreError::FarAncestor { .. }) => None,
        found => found?,
    };
    let parted = store.parted_texts(owner, &id, [from.clone(), to.clone()]).await;
    let parted = parted.map_err(|error| about_either(error, &from))?;
    let vocabulary = Arc::clone(state.loaded()?.tokenizer.vocabulary());
    let bytes = parted.ends.iter().map(|tokens| size_of_val(tokens.as_slice())).sum();
    let (common_tokens, changes) = run_blocking(&state, bytes, move || compare(&parted, &vocabulary)).await?;
    let (id, from, to) = (id.to_string(), from.to_string(), to.to_string());
    let common_ancestor = common_ancestor.map(|version| version.to_string());
    Ok(Json(SessionDiff { object: DiffKind, id, from, to, common_tokens, common_ancestor, changes }))
}

/// Returns the version that the parameter names, if anything that the owner stores lists it.
async fn listed(
    store: &Store,
    owner: Owner,
    id: &SessionId,
    (text, param): (&str, &str),
) -> Result<VersionId, ApiError> {
    let (_, version) = resolve_any(store, owner, id, (text, param)).await?;
    let found = store.chain(owner, id, ChainFrom::Version(version.clone()), 1).await;
    found.map_err(|error| ApiError::from(error).renamed("version", param))?;
    Ok(version)
}

/// Converts an error about one of the two texts, so that it names the right parameter. `from` is the first version.
fn about_either(error: StoreError, from: &VersionId) -> ApiError {
    let param = match &error {
        StoreError::TextNotKept { version } | StoreError::FarApart { version, .. } if version != from => "to",
        _ => "from",
    };
    ApiError::from(error).renamed("version", param)
}

/// Returns the number of tokens that both texts begin with, and the changes after them.
fn compare(parted: &PartedTexts, vocabulary: &Vocabulary) -> Result<(u64, Vec<TextChange>), ApiError> {
    let PartedTexts { start, ends: [one, other] } = parted;
    let cut = first_difference([one, other], *start == 0, vocabulary);
    let text = |tokens: &[u32]| {
        let (before, rest) = tokens.split_at(cut);
        decode(&vocabulary.text_of(rest, *start == 0 && vocabulary.is_beginning(before)))
    };
    let [old, new] = [one, other].map(|tokens| text(tokens));
    let too_different = |error: TooDifferent| {
        let message = format!("from and to must be versions whose texts have {error}");
        ApiError::request(StatusCode::BAD_REQUEST, Some("from"), Some("diff_too_long"), message)
    };
    let changes = if old == new { Vec::new() } else { diff_texts(&old, &new).map_err(too_different)? };
    Ok((start + cut as u64, changes.into_iter().map(TextChange::from).collect()))
}

/// Returns where the comparison begins: at the first token that differs, or earlier if a word or a character of either
/// text begins before it. `whole` says whether the tokens are those of the whole texts.
fn first_difference(texts: [&[u32]; 2], whole: bool, vocabulary: &Vocabulary) -> usize {
    let [one, other] = texts;
    let same = one.iter().zip(other).take_while(|(one, other)| one == other).count();
    let last_byte = |at: usize| vocabulary.bytes_of(&one[at.saturating_sub(NEAR)..at]).last().copied();
    let next_byte =
        |text: &[u32], at: usize| vocabulary.bytes_of(&text[at..text.len().min(at + NEAR)]).first().copied();
    let is_white = |byte: u8| byte.is_ascii_whitespace();
    let in_character = |at: usize| texts.iter().any(|text| next_byte(text, at).is_some_and(|byte| byte & 0xC0 == 0x80));
    // If one text ends here, the other one continues it, whatever comes next.
    let between_words = |at: usize| {
        let begins = if at == 0 { whole } else { last_byte(at).is_none_or(is_white) };
        begins
            || texts.iter().any(|text| at == text.len())
            || texts.iter().all(|text| next_byte(text, at).is_none_or(is_white))
    };
    let places = || (same.saturating_sub(MAX_BACK)..=same).rev();
    let word = places().find(|at| !in_character(*at) && between_words(*at));
    word.or_else(|| places().find(|at| !in_character(*at))).unwrap_or(same)
}
