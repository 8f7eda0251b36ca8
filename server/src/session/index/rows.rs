//! What an index says about sessions, versions and responses. The names of fields are part of the file format.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::session::conversation::Ancestor;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::tag::{TagName, VersionRef};

/// A session. Ids are plain text here, because they were checked on arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRow {
    pub(crate) owner: Owner,
    /// Position in the order of creation.
    pub(crate) number: u64,
    /// Unix seconds.
    pub(crate) created: u64,
    /// Unix seconds.
    pub(crate) updated: u64,
    /// Last use, unix milliseconds.
    pub(crate) used: u64,
    /// Seconds after its last use when it expires.
    pub(crate) ttl: Option<u64>,
    pub(crate) head: String,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) forked_from: Option<(String, String)>,
    /// Position of its next version.
    pub(crate) next: u64,
    /// Number of versions whose snapshots it keeps, including its head.
    pub(crate) kept: u64,
    /// Number of versions whose snapshots are gone, but which it still lists.
    pub(crate) known: u64,
    /// The client's names for versions that it lists.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tags: BTreeMap<String, String>,
}

impl SessionRow {
    /// Expiry in unix milliseconds, given that the session was last used at `used` or later.
    pub(crate) fn ends(&self, used: u64) -> Option<u64> {
        self.ttl.map(|ttl| self.used.max(used).saturating_add(ttl.saturating_mul(1000)))
    }

    /// A new session. The index fills in the counts.
    pub(crate) fn new(owner: Owner, head: &str, ttl: Option<u64>, now: u64) -> Self {
        Self {
            owner,
            number: 0,
            created: now / 1000,
            updated: now / 1000,
            used: now,
            ttl,
            head: head.to_owned(),
            metadata: BTreeMap::new(),
            forked_from: None,
            next: 0,
            kept: 0,
            known: 0,
            tags: BTreeMap::new(),
        }
    }

    /// Records a change, which is also a use.
    pub(crate) fn touch(&mut self, now: u64) {
        self.used = self.used.max(now);
        // Another server's clock may be ahead of this one's.
        self.updated = self.updated.max(now / 1000);
    }

    /// The version that is meant in this session; the head by default.
    pub(crate) fn resolve<'v>(&'v self, version: Option<&'v VersionRef>) -> Result<&'v str, StoreError> {
        match version {
            None => Ok(&self.head),
            Some(VersionRef::Id(id)) => Ok(id.as_str()),
            Some(VersionRef::Tag(name)) => self.tagged(name),
        }
    }

    /// The version that a tag names.
    pub(crate) fn tagged(&self, name: &TagName) -> Result<&str, StoreError> {
        self.tags.get(name.as_str()).map(String::as_str).ok_or(StoreError::TAG)
    }

    /// The names of a version's tags.
    pub(crate) fn tags_of(&self, version: &str) -> Vec<String> {
        self.tags.iter().filter(|(_, tagged)| *tagged == version).map(|(name, _)| name.clone()).collect()
    }

    /// The versions that have tags.
    pub(crate) fn tagged_versions(&self) -> HashSet<&str> {
        self.tags.values().map(String::as_str).collect()
    }
}

/// A version: the description of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VersionRow {
    pub(crate) owner: Owner,
    pub(crate) parent: Option<String>,
    pub(crate) tokens: u64,
    /// Unix milliseconds.
    pub(crate) time: u64,
    pub(crate) label: Option<String>,
    pub(crate) kind: String,
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// Size of its object; an empty version has none.
    pub(crate) bytes: u64,
    /// The sampler's seed, for an empty version.
    pub(crate) seed: Option<u64>,
    /// Number of sessions and responses that keep its object.
    pub(crate) kept_by: u64,
    /// Number of sessions and responses that list this version, including those that keep its object.
    pub(crate) known_by: u64,
    /// The versions from which it was made, oldest first, if it comes from a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) origin: Vec<Ancestor>,
    /// The session that made it; `None` for a response, and if an earlier version of the server made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<String>,
}

/// A version in a session's list.
#[derive(Clone, Debug)]
pub(crate) struct LineageEntry {
    pub(crate) position: u64,
    pub(crate) version: String,
    pub(crate) kept: bool,
}

/// A session, and the version from which its next turn starts.
pub(crate) type Head = (SessionRow, VersionRow);

/// A version that a session lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) id: String,
    pub(crate) row: VersionRow,
    /// Whether the session keeps its snapshot.
    pub(crate) kept: bool,
}

/// A stored response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseRow {
    pub(crate) owner: Owner,
    pub(crate) version: String,
    /// Expiry in unix milliseconds.
    pub(crate) ends: u64,
    pub(crate) body: Vec<u8>,
}

/// A stream whose events can be computed again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamRow {
    pub(crate) owner: Owner,
    /// What the request was. The index does not look into it.
    pub(crate) record: Vec<u8>,
}
