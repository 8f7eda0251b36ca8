//! What the routes of sessions take, and the bounds of what clients write to a session for themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{ChatMessage, Seed};
use crate::api::openapi::{messages, metadata as described_metadata, seed, token_ids};
use crate::session::Metadata;

/// OpenAI's bounds.
const MAX_PAIRS: usize = 16;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 512;

/// Longest label of a turn, in characters.
const MAX_LABEL: usize = 256;

/// Longest time to live: ten years.
const MAX_TTL: u64 = 10 * 366 * 24 * 3600;

/// A text to be read, in one of three forms.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct AppendRequest {
    /// A text to be read.
    pub(super) text: Option<String>,
    #[schema(schema_with = token_ids)]
    pub(super) tokens: Option<Vec<u32>>,
    #[schema(schema_with = messages)]
    pub(super) messages: Option<Vec<ChatMessage>>,
    /// A name for the version that is made.
    #[schema(max_length = 256)]
    pub(super) label: Option<String>,
}

/// A session to be made.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct CreateRequest {
    /// A text to be read.
    pub(super) text: Option<String>,
    #[schema(schema_with = token_ids)]
    pub(super) tokens: Option<Vec<u32>>,
    #[schema(schema_with = messages)]
    pub(super) messages: Option<Vec<ChatMessage>>,
    /// A version that the caller has, of any session.
    pub(super) version: Option<String>,
    /// The bytes of a snapshot, in base64.
    #[schema(content_encoding = "base64")]
    pub(super) snapshot: Option<String>,
    #[schema(schema_with = seed)]
    pub(super) seed: Option<Seed>,
    #[schema(schema_with = described_metadata)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// How long it is kept after its last use; for ever where it is absent.
    #[schema(minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Option<u64>,
    /// A name for the version that is made.
    #[schema(max_length = 256)]
    pub(super) label: Option<String>,
}

/// What is to be noted of a session; what is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct PatchRequest {
    #[schema(schema_with = described_metadata)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// How long it is kept after its last use; null for ever.
    #[serde(default)]
    #[schema(value_type = Option<u64>, minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Change<u64>,
}

/// Sessions to be made from one.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ForkRequest {
    /// How many; 1 where it is absent.
    #[schema(minimum = 1, maximum = 1000)]
    pub(super) n: Option<u64>,
    /// The version that they begin at; the head where it is absent.
    pub(super) version: Option<String>,
    #[schema(schema_with = described_metadata)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// How long it is kept after its last use; for ever where it is absent.
    #[schema(minimum = 1, maximum = 316_224_000)]
    pub(super) ttl_seconds: Option<u64>,
}

/// Where to go back to.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct RewindRequest {
    /// The version to go to, of this session.
    pub(super) version: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ListQuery {
    pub(in crate::api) limit: Option<u64>,
    pub(in crate::api) after: Option<String>,
    pub(in crate::api) order: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SnapshotQuery {
    pub(in crate::api) version: Option<String>,
}

/// What is to become of a value: absent in the body, null, or there.
#[derive(Debug, Default)]
pub(super) enum Change<T> {
    /// It stays.
    #[default]
    None,
    /// There is none any more.
    Away,
    /// It is this.
    To(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Change<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(deserializer)?.map_or(Self::Away, Self::To))
    }
}

/// What a client writes to a session, within its bounds.
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

/// How long a session is kept after its last use.
pub(super) fn ttl(seconds: u64) -> Result<Duration, ApiError> {
    if (1..=MAX_TTL).contains(&seconds) {
        return Ok(Duration::from_secs(seconds));
    }
    let message = format!("ttl_seconds must be from 1 to {MAX_TTL}, found {seconds}");
    Err(ApiError::invalid(Some("ttl_seconds"), message))
}

/// A turn's label.
pub(in crate::api) fn label(label: Option<String>) -> Result<Option<String>, ApiError> {
    match label {
        Some(label) if label.chars().count() > MAX_LABEL => {
            let message = format!("label must have at most {MAX_LABEL} characters, found {}", label.chars().count());
            Err(ApiError::invalid(Some("label"), message))
        }
        label => Ok(label),
    }
}
