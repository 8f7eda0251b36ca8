//! The wire types of sessions, and the limits of the metadata, labels and lifetimes that clients set.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{ChatMessage, Seed};
use crate::api::openapi::literals::literals;
use crate::api::openapi::schemas::{TokenIds, json_schemas};
use crate::session::{self, Metadata, VersionId};

/// OpenAI's limits on metadata.
const MAX_PAIRS: usize = 16;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 512;

/// Longest label of a turn, in characters.
const MAX_LABEL: usize = 256;

/// Longest time to live in seconds: ten years.
const MAX_TTL: u64 = 10 * 366 * 24 * 3600;

/// The field `metadata`.
pub(in crate::api) struct MetadataField;

json_schemas! {
    MetadataField: "Metadata" = {
        "description": "The client's own notes.",
        "type": "object", "maxProperties": MAX_PAIRS, "propertyNames": {"minLength": 1, "maxLength": MAX_KEY},
        "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
    };
}

/// Text to append, in one of three forms.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct AppendRequest {
    /// The text to read.
    pub(super) text: Option<String>,
    #[schema(value_type = Option<TokenIds>)]
    pub(super) tokens: Option<Vec<u32>>,
    #[schema(min_items = 1, max_items = 10_000)]
    pub(super) messages: Option<Vec<ChatMessage>>,
    /// A name for the new version.
    #[schema(max_length = 256)]
    pub(super) label: Option<String>,
}

/// A new session.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateRequest {
    /// The model, as in `/v1/models`, which the session then belongs to. Default: the first one.
    pub(super) model: Option<String>,
    /// The text to read.
    pub(super) text: Option<String>,
    #[schema(value_type = Option<TokenIds>)]
    pub(super) tokens: Option<Vec<u32>>,
    #[schema(min_items = 1, max_items = 10_000)]
    pub(super) messages: Option<Vec<ChatMessage>>,
    /// The version to start from, of any of your sessions.
    pub(super) version: Option<String>,
    /// A snapshot, in base64.
    #[schema(content_encoding = "base64")]
    pub(super) snapshot: Option<String>,
    /// The seed of the random numbers of the session's turns. Default: random.
    pub(super) seed: Option<Seed>,
    #[schema(value_type = Option<MetadataField>)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Seconds until an unused session is deleted. Default: never.
    #[schema(minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Option<u64>,
    /// A name for the new version.
    #[schema(max_length = 256)]
    pub(super) label: Option<String>,
}

/// Changes to a session. Absent fields stay as they are.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PatchRequest {
    #[schema(value_type = Option<MetadataField>)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Seconds until an unused session is deleted; null for never.
    #[serde(default)]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Change<u64>,
    /// The label of the session's version; null removes it.
    #[serde(default)]
    #[schema(value_type = Option<String>, max_length = 256)]
    pub(super) label: Change<String>,
}

/// Forks of a session.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ForkRequest {
    /// The number of forks. Default: 1.
    #[schema(minimum = 1, maximum = 1000)]
    pub(super) n: Option<u64>,
    /// The version to fork from, or a tag of the session. Default: the head.
    pub(super) version: Option<String>,
    #[schema(value_type = Option<MetadataField>)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Seconds until an unused session is deleted. Default: never.
    #[schema(minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Option<u64>,
}

/// The target of a rewind.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RewindRequest {
    /// A version of yours whose snapshot is kept, or a tag of this session.
    pub(super) version: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SnapshotQuery {
    /// A version or tag of this session. Default: the head.
    #[param(nullable = false)]
    pub(super) version: Option<String>,
}

literals!(
    SessionKind = "session",
    ListKind = "list",
    TurnKind = "turn",
    TagKind = "tag",
    DeletedTagKind = "tag.deleted",
    LineageKind = "lineage",
    DeletedKind = "session.deleted"
);

/// A session.
#[derive(Serialize, ToSchema)]
pub(super) struct Session {
    id: String,
    object: SessionKind,
    /// When it was created, in seconds since 1970.
    created: u64,
    /// When it was last changed, in seconds since 1970.
    updated: u64,
    /// When it is deleted unless it is used before, in seconds since 1970; null for never.
    #[schema(required)]
    expires: Option<u64>,
    /// Seconds until an unused session is deleted; null for never.
    #[schema(required)]
    ttl_seconds: Option<u64>,
    metadata: Metadata,
    /// The head: the version that the next turn starts from.
    version: String,
    /// The version before the head.
    #[schema(required)]
    parent: Option<String>,
    /// The head's label.
    #[schema(required)]
    label: Option<String>,
    /// Tokens of the whole conversation; for translations, of the last source and its translation.
    tokens: u64,
    /// Size of the state in bytes, which does not depend on the number of tokens.
    state_bytes: u64,
    /// Whether a turn is running.
    in_use: bool,
    #[schema(required)]
    forked_from: Option<ForkedFrom>,
    /// The version that each tag names.
    tags: BTreeMap<String, String>,
}

/// The session and version that a session was forked from.
#[derive(Serialize, ToSchema)]
struct ForkedFrom {
    session: String,
    version: String,
}

impl Session {
    pub(super) fn new(session: &session::Session, state_bytes: u64) -> Self {
        let head = &session.head;
        let forked_from = session.forked_from.as_ref();
        Self {
            id: session.id.to_string(),
            object: SessionKind,
            created: session.created,
            updated: session.updated,
            expires: session.expires,
            ttl_seconds: session.ttl,
            metadata: session.metadata.clone(),
            version: head.id.to_string(),
            parent: head.parent.as_ref().map(ToString::to_string),
            label: head.label.clone(),
            tokens: head.tokens,
            state_bytes,
            in_use: session.in_use,
            forked_from: forked_from
                .map(|(session, version)| ForkedFrom { session: session.to_string(), version: version.to_string() }),
            tags: session.tags.iter().map(|(name, version)| (name.clone(), version.to_string())).collect(),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

/// A session after an append.
#[derive(Serialize, ToSchema)]
pub(super) struct Appended {
    /// The number of tokens read.
    pub(super) appended_tokens: u64,
    #[serde(flatten)]
    pub(super) session: Session,
}

/// The new sessions of a fork.
#[derive(Serialize, ToSchema)]
pub(super) struct ForkedSessions {
    pub(super) object: ListKind,
    pub(super) data: Vec<Session>,
}

/// The versions of a session, in the order in which the session got them.
#[derive(Serialize, ToSchema)]
pub(super) struct Turns {
    pub(super) object: ListKind,
    pub(super) data: Vec<Version>,
    /// Always false: the list is complete.
    pub(super) has_more: bool,
}

/// A version of a session, and the turn that created it.
#[derive(Serialize, ToSchema)]
pub(super) struct Version {
    object: TurnKind,
    #[serde(rename = "version")]
    id: String,
    #[schema(required)]
    parent: Option<String>,
    /// Tokens of the conversation at this version.
    tokens: u64,
    /// When it was created, in milliseconds since 1970.
    time: u64,
    #[schema(required)]
    label: Option<String>,
    /// What created it: `turn`, `append`, `interrupted`, …
    kind: String,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Size of the snapshot in bytes.
    bytes: u64,
    /// Whether the snapshot still exists, so that the session can be rewound to it.
    kept: bool,
    /// Whether the next turn starts from it.
    head: bool,
    /// The session that created it; null for a stored response, and if it is not known.
    #[schema(required)]
    session: Option<String>,
    /// The names of its tags in this session.
    tags: Vec<String>,
}

impl Version {
    pub(super) fn new(version: session::Version, head: &VersionId) -> Self {
        Self {
            object: TurnKind,
            id: version.id.to_string(),
            parent: version.parent.as_ref().map(ToString::to_string),
            tokens: version.tokens,
            time: version.time,
            label: version.label,
            kind: version.kind,
            prompt_tokens: version.prompt_tokens,
            completion_tokens: version.completion_tokens,
            bytes: version.bytes,
            kept: version.kept,
            head: version.id == *head,
            session: version.session.as_ref().map(ToString::to_string),
            tags: version.tags,
        }
    }
}

/// A session that was deleted.
#[derive(Serialize, ToSchema)]
pub(super) struct DeletedSession {
    pub(super) id: String,
    pub(super) object: DeletedKind,
    pub(super) deleted: bool,
}

/// A field of a patch.
#[derive(Debug, Default)]
pub(super) enum Change<T> {
    /// The field is absent: the value stays.
    #[default]
    Keep,
    /// The field is null: the value is removed.
    Clear,
    Set(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Clear, Self::Set))
    }
}

/// Checks the limits of metadata.
pub(in crate::api) fn metadata(pairs: BTreeMap<String, String>) -> Result<Metadata, ApiError> {
    let invalid = |message| Err(ApiError::invalid(Some("metadata"), message));
    if pairs.len() > MAX_PAIRS {
        return invalid(format!("metadata must have at most {MAX_PAIRS} pairs, found {}", pairs.len()));
    }
    for (key, value) in &pairs {
        if key.is_empty() || key.chars().count() > MAX_KEY {
            return invalid(format!("metadata must have keys of 1 to {MAX_KEY} characters"));
        }
        if value.chars().count() > MAX_VALUE {
            return invalid(format!("metadata must have values of at most {MAX_VALUE} characters, {key:?} has more"));
        }
    }
    Ok(pairs)
}

/// Checks the lifetime of an unused session.
pub(super) fn ttl(seconds: u64) -> Result<Duration, ApiError> {
    if (1..=MAX_TTL).contains(&seconds) {
        return Ok(Duration::from_secs(seconds));
    }
    let message = format!("ttl_seconds must be from 1 to {MAX_TTL}, found {seconds}");
    Err(ApiError::invalid(Some("ttl_seconds"), message))
}

/// Checks the length of a turn's label.
pub(in crate::api) fn label(label: Option<String>) -> Result<Option<String>, ApiError> {
    match label {
        Some(label) if label.chars().count() > MAX_LABEL => {
            let message = format!("label must have at most {MAX_LABEL} characters, found {}", label.chars().count());
            Err(ApiError::invalid(Some("label"), message))
        }
        label => Ok(label),
    }
}
