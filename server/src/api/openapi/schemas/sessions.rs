//! What the routes of sessions answer.

use std::collections::BTreeMap;

use utoipa::ToSchema;

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum SessionKind {
    Session,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum PageKind {
    List,
}

#[derive(ToSchema)]
#[serde(rename_all = "lowercase")]
enum TurnKind {
    Turn,
}

/// A conversation that is kept.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Session {
    id: String,
    object: SessionKind,
    /// Seconds since 1970.
    created: u64,
    /// When it was last changed, in seconds since 1970.
    updated: u64,
    /// When it ends unless it is used before, in seconds since 1970.
    #[schema(required)]
    expires: Option<u64>,
    /// How long it is kept after its last use.
    #[schema(required)]
    ttl_seconds: Option<u64>,
    metadata: BTreeMap<String, String>,
    /// Its head: where the next turn begins.
    version: String,
    /// The version before that.
    #[schema(required)]
    parent: Option<String>,
    /// The head's label.
    #[schema(required)]
    label: Option<String>,
    /// Tokens of the whole conversation; where texts are translated, of the last source and its translation.
    tokens: u64,
    /// Bytes of its state, however long it is.
    state_bytes: u64,
    /// Whether a turn is running.
    in_use: bool,
    #[schema(required)]
    forked_from: Option<ForkedFrom>,
}

/// Where a session comes from.
#[derive(ToSchema)]
struct ForkedFrom {
    session: String,
    version: String,
}

/// A session that something has been appended to.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Appended {
    /// Tokens that were read.
    appended_tokens: u64,
    #[serde(flatten)]
    session: Session,
}

/// A page of sessions.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Sessions {
    object: PageKind,
    data: Vec<Session>,
    #[schema(required)]
    first_id: Option<String>,
    /// What to give as `after` for the next page.
    #[schema(required)]
    last_id: Option<String>,
    has_more: bool,
}

/// The sessions that a fork has made.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct ForkedSessions {
    object: PageKind,
    data: Vec<Session>,
}

/// The versions of a session, oldest first.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Turns {
    object: PageKind,
    data: Vec<Version>,
    has_more: bool,
}

/// A version of a session, and the turn that made it.
#[derive(ToSchema)]
struct Version {
    object: TurnKind,
    version: String,
    #[schema(required)]
    parent: Option<String>,
    /// Tokens of the conversation then.
    tokens: u64,
    /// Milliseconds since 1970.
    time: u64,
    #[schema(required)]
    label: Option<String>,
    /// What made it: `turn`, `append`, `interrupted`, …
    kind: String,
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Bytes of its snapshot.
    bytes: u64,
    /// Whether its snapshot is still there to go back to.
    kept: bool,
    /// Whether it is the one that the next turn begins at.
    head: bool,
}

/// Something that is no more.
#[derive(ToSchema)]
pub(in crate::api::openapi) struct Deleted {
    id: String,
    /// What it was.
    object: String,
    deleted: bool,
}
