//! The rows of an index: sessions, versions and responses. Field names are part of the file format.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::session::conversation::Ancestor;
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::tag::{TagName, VersionRef};

/// A session. Ids are plain text here, because they were validated on arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRow {
    pub(crate) owner: Owner,
    /// Position in the order of creation.
    pub(crate) number: u64,
    /// Unix seconds.
    pub(crate) created: u64,
    /// Unix seconds.
    pub(crate) updated: u64,
    /// Last use in unix milliseconds.
    pub(crate) used: u64,
    /// Time to live: seconds from the last use to expiry.
    pub(crate) ttl: Option<u64>,
    pub(crate) head: String,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) forked_from: Option<(String, String)>,
    /// Position of the session's next version.
    pub(crate) next: u64,
    /// Number of versions whose snapshots the session keeps, including the head.
    pub(crate) kept: u64,
    /// Number of versions that the session still lists although their snapshots are gone.
    pub(crate) known: u64,
    /// The session's tags: the client's names for versions that the session lists.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tags: BTreeMap<String, String>,
}

impl SessionRow {
    /// Returns the expiry in unix milliseconds, given that the session was last used at `used` or later.
    pub(crate) fn ends(&self, used: u64) -> Option<u64> {
        self.ttl.map(|ttl| self.used.max(used).saturating_add(ttl.saturating_mul(1000)))
    }

    /// Creates the row of a new session. The index fills in the counts.
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

    /// Records a change, which also counts as a use.
    pub(crate) fn touch(&mut self, now: u64) {
        self.used = self.used.max(now);
        // Another server's clock may be ahead of this one's.
        self.updated = self.updated.max(now / 1000);
    }

    /// Resolves a version reference in this session; by default the head.
    pub(crate) fn resolve<'v>(&'v self, version: Option<&'v VersionRef>) -> Result<&'v str, StoreError> {
        match version {
            None => Ok(&self.head),
            Some(VersionRef::Id(id)) => Ok(id.as_str()),
            Some(VersionRef::Tag(name)) => self.tagged(name),
        }
    }

    /// Returns the version that a tag names.
    pub(crate) fn tagged(&self, name: &TagName) -> Result<&str, StoreError> {
        self.tags.get(name.as_str()).map(String::as_str).ok_or(StoreError::TAG)
    }

    /// Returns the names of a version's tags.
    pub(crate) fn tags_of(&self, version: &str) -> Vec<String> {
        self.tags.iter().filter(|(_, tagged)| *tagged == version).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the versions that have tags.
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
    /// Size of the version's object in bytes; 0 for an empty version, which has none.
    pub(crate) bytes: u64,
    /// The sampler's seed, if the version is empty.
    pub(crate) seed: Option<u64>,
    /// Number of sessions and responses that keep the version's object.
    pub(crate) kept_by: u64,
    /// Number of sessions and responses that list the version, including those that keep its object.
    pub(crate) known_by: u64,
    /// The versions from which it was created, oldest first, if it comes from a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) origin: Vec<Ancestor>,
    /// The session that created it; `None` for a response, and if an earlier version of the server created it.
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
    /// Whether the session keeps the version's snapshot.
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
    /// The record of the request, which is opaque to the index.
    pub(crate) record: Vec<u8>,
}
