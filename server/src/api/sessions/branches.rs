//! The routes for tags, labels and ancestors of versions.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query};
use axum::http::HeaderMap;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::http::{path_id, read_json, read_query, resolve, resolve_any};
use super::wire::{Change, DeletedTagKind, LineageKind, ListKind, TagKind, Version, label as checked};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::{BodyErrors, Error, Id, StoreErrors};
use crate::api::request::continuation::{session_id, version_id};
use crate::api::select::Model;
use crate::session::{self, ChainFrom, SessionId, TagName, VersionRef};

/// Most versions in one page of a lineage.
const MAX_PAGE: u64 = 1000;

/// The label of a version.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LabelRequest {
    /// The new label; null removes it. Without this field, nothing changes.
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 256)]
    label: Change<String>,
}

/// What a tag names.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct TagRequest {
    /// A version or tag of the session. Default: the head.
    version: Option<String>,
}

/// A session's name for one of its versions.
#[derive(Serialize, ToSchema)]
pub(super) struct Tag {
    object: TagKind,
    name: String,
    version: String,
    /// Tokens of the conversation at this version.
    tokens: u64,
    #[schema(required)]
    label: Option<String>,
    /// Whether the snapshot still exists, so that the session can be rewound to it.
    kept: bool,
}

impl From<session::Tag> for Tag {
    fn from(tag: session::Tag) -> Self {
        let session::Tag { name, version } = tag;
        let id = version.id.to_string();
        Self { object: TagKind, name, version: id, tokens: version.tokens, label: version.label, kept: version.kept }
    }
}

/// The tags of a session, by name.
#[derive(Serialize, ToSchema)]
pub(super) struct Tags {
    object: ListKind,
    data: Vec<Tag>,
    /// Always false: the list is complete.
    has_more: bool,
}

/// A tag that was removed.
#[derive(Serialize, ToSchema)]
pub(super) struct DeletedTag {
    name: String,
    object: DeletedTagKind,
    deleted: bool,
}

/// Parses the session and the name in a path.
fn path_pair(path: Result<Path<(String, String)>, PathRejection>) -> Result<(SessionId, String), ApiError> {
    let Path((id, name)) = path.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    Ok((session_id(&id, "session")?, name))
}

fn tag_name(text: &str) -> Result<TagName, ApiError> {
    let message = || {
        let rule = "must have 1 to 64 letters, digits, `.`, `_` or `-`, and begin neither with `.` nor with `ver_`";
        let found: String = text.chars().take(100).collect();
        ApiError::invalid(Some("name"), format!("name {rule}, found {found:?}"))
    };
    TagName::parse(text).ok_or_else(message)
}

/// Change the label of a version
///
/// The label belongs to the version: every session that lists the version has the new label.
#[utoipa::path(
    patch,
    path = "/v1/sessions/{id}/turns/{version}",
    operation_id = "changeTurn",
    tag = "sessions",
    params(Id, ("version" = String, Path, description = "A version or tag of the session.", min_length = 1)),
    request_body(content = Option<LabelRequest>, examples(
        ("a label" = (value = json!({"label": "the good ending"}))),
        ("none" = (value = json!({"label": null})))
    )),
    responses((status = 200, description = "The version.", body = Version), StoreErrors, BodyErrors, Error<507>)
)]
pub(super) async fn label(
    Model(state): Model,
    Caller(owner): Caller,
    path: Result<Path<(String, String)>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<Version>, ApiError> {
    let (id, version) = path_pair(path)?;
    let request: LabelRequest = read_json(&state, &headers, bytes).await?;
    let label = match request.label {
        Change::Keep => None,
        Change::Clear => Some(None),
        Change::Set(label) => Some(checked(Some(label))?),
    };
    let store = state.store()?;
    let version = resolve(store, owner, &id, (&version, "version")).await?;
    let version = if let Some(label) = label {
        store.label(owner, &id, VersionRef::Id(version), label).await?
    } else {
        let found = store.versions(owner, &id).await?.into_iter().find(|found| found.id == version);
        found.ok_or_else(|| ApiError::missing("version", "version"))?
    };
    let head = store.get(owner, &id).await?.head.id;
    Ok(Json(Version::new(version, &head)))
}

/// List the tags of a session
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/tags",
    operation_id = "listTags",
    tag = "sessions",
    params(Id),
    responses((status = 200, description = "The tags, by name.", body = Tags), StoreErrors)
)]
pub(super) async fn tags(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Tags>, ApiError> {
    let tags = state.store()?.tags(owner, &path_id(id)?).await?;
    Ok(Json(Tags { object: ListKind, data: tags.into_iter().map(Tag::from).collect(), has_more: false }))
}

/// Tag a version of a session, or move a tag
///
/// The tag can be used wherever a version of this session can. The snapshot of a tagged version is kept beyond
/// `--keep-versions`, and where space is short, it is deleted last.
#[utoipa::path(
    put,
    path = "/v1/sessions/{id}/tags/{name}",
    operation_id = "setTag",
    tag = "sessions",
    params(Id, ("name" = String, Path, description = "The tag.", pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")),
    request_body(content = Option<TagRequest>, examples(
        ("the head" = (value = json!({}))),
        ("another tag's version" = (value = json!({"version": "best"})))
    )),
    responses((status = 200, description = "The tag.", body = Tag), StoreErrors, BodyErrors, Error<507>)
)]
pub(super) async fn tag(
    Model(state): Model,
    Caller(owner): Caller,
    path: Result<Path<(String, String)>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Json<Tag>, ApiError> {
    let (id, name) = path_pair(path)?;
    let name = tag_name(&name)?;
    let request: TagRequest = read_json(&state, &headers, bytes).await?;
    let missing = || ApiError::missing("version", "version");
    let meant = request.version.map(|text| VersionRef::parse(&text).ok_or_else(missing)).transpose()?;
    let tagged = state.store()?.tag(owner, &id, name, meant).await;
    Ok(Json(tagged.map_err(|error| ApiError::from(error).renamed("tag", "version"))?.into()))
}

/// Remove a tag from a session
///
/// The tagged version stays.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}/tags/{name}",
    operation_id = "deleteTag",
    tag = "sessions",
    params(Id, ("name" = String, Path, description = "The tag.", min_length = 1)),
    responses((status = 200, description = "The tag is removed.", body = DeletedTag), StoreErrors, Error<507>)
)]
pub(super) async fn untag(
    Model(state): Model,
    Caller(owner): Caller,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<DeletedTag>, ApiError> {
    let (id, name) = path_pair(path)?;
    let tag = TagName::parse(&name).ok_or_else(|| ApiError::missing("name", "tag"))?;
    let removed = state.store()?.untag(owner, &id, &tag).await;
    removed.map_err(|error| ApiError::from(error).renamed("tag", "name"))?;
    Ok(Json(DeletedTag { name, object: DeletedTagKind, deleted: true }))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LineageQuery {
    /// Where the chain begins: a version of yours, or a tag of this session. Default: the head.
    #[param(nullable = false)]
    version: Option<String>,
    /// Another session, or a version or tag of this session. The answer then has the common ancestor.
    #[param(nullable = false)]
    with: Option<String>,
    /// Versions per page. Default: 100.
    #[param(nullable = false, minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// The last version of the previous page.
    #[param(nullable = false)]
    after: Option<String>,
}

/// A version and its ancestors, the newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct Lineage {
    object: LineageKind,
    data: Vec<Ancestor>,
    has_more: bool,
    /// The newest version that the chain shares with that of `with`; null if there is none, and without `with`.
    #[schema(required)]
    common_ancestor: Option<String>,
    /// What `with` named; null without it.
    #[schema(required)]
    with: Option<Compared>,
}

/// The other end of a comparison.
#[derive(Serialize, ToSchema)]
pub(super) struct Compared {
    /// The session; null if `with` is a version or a tag.
    #[schema(required)]
    session: Option<String>,
    /// The version; if `with` is a session, its head.
    version: String,
}

/// A version in a lineage.
#[derive(Serialize, ToSchema)]
pub(super) struct Ancestor {
    version: String,
    /// The version before it. No session lists the parent of the last entry any more.
    #[schema(required)]
    parent: Option<String>,
    /// The session that created it, which may be deleted by now; null for a stored response, and if it is not known.
    #[schema(required)]
    session: Option<String>,
    #[schema(required)]
    label: Option<String>,
    /// The names of its tags in the session of the request.
    tags: Vec<String>,
    /// When it was created, in milliseconds since 1970.
    time: u64,
    /// Tokens of the conversation at this version.
    tokens: u64,
    /// What created it: `turn`, `append`, `interrupted`, …
    kind: String,
    /// Whether the snapshot still exists, in any session.
    kept: bool,
}

impl From<session::Version> for Ancestor {
    fn from(version: session::Version) -> Self {
        Self {
            version: version.id.to_string(),
            parent: version.parent.as_ref().map(ToString::to_string),
            session: version.session.as_ref().map(ToString::to_string),
            label: version.label,
            tags: version.tags,
            time: version.time,
            tokens: version.tokens,
            kind: version.kind,
            kept: version.kept,
        }
    }
}

/// List a version's ancestors, across forks
///
/// From the head, or from `version`, back to the first version, whichever sessions created them. With `with`, the
/// answer also has the version where the two conversations parted.
#[utoipa::path(
    get,
    path = "/v1/sessions/{id}/lineage",
    operation_id = "listLineage",
    tag = "sessions",
    params(Id, LineageQuery),
    responses((status = 200, description = "A page of the chain, the newest version first.", body = Lineage), StoreErrors)
)]
pub(super) async fn lineage(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<LineageQuery>, QueryRejection>,
) -> Result<Json<Lineage>, ApiError> {
    let (id, query) = (path_id(id)?, read_query(query)?);
    let limit = query.limit.unwrap_or(100);
    if !(1..=MAX_PAGE).contains(&limit) {
        return Err(ApiError::invalid(Some("limit"), format!("limit must be from 1 to {MAX_PAGE}, found {limit}")));
    }
    let store = state.store()?;
    let start = match &query.version {
        Some(version) => resolve(store, owner, &id, (version, "version")).await?,
        None => store.get(owner, &id).await?.head.id,
    };
    let (from, param) = match &query.after {
        Some(after) => (ChainFrom::After(version_id(after, "after")?), "after"),
        None => (ChainFrom::Version(start.clone()), "version"),
    };
    let chain = store.chain(owner, &id, from, limit as usize).await;
    let (versions, has_more) = chain.map_err(|error| ApiError::from(error).renamed("version", param))?;
    let (mut common_ancestor, mut compared) = (None, None);
    if let Some(with) = &query.with {
        let (session, version) = resolve_any(store, owner, &id, (with, "with")).await?;
        let common = store.common_ancestor(owner, start, version.clone()).await;
        let common = common.map_err(|error| ApiError::from(error).renamed("version", "with"))?;
        common_ancestor = common.map(|version| version.to_string());
        let session = session.map(|session| session.to_string());
        compared = Some(Compared { session, version: version.to_string() });
    }
    let data = versions.into_iter().map(Ancestor::from).collect();
    Ok(Json(Lineage { object: LineageKind, data, has_more, common_ancestor, with: compared }))
}
