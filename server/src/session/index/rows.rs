//! What the index writes down of a session and of a version.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::session::Owner;

/// A session. Ids are text here: they are the store's own, checked where they came in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SessionRow {
    pub(crate) owner: Owner,
    /// Its place in the order of creation.
    pub(crate) number: u64,
    /// Unix seconds.
    pub(crate) created: u64,
    /// Unix seconds.
    pub(crate) updated: u64,
    /// Last use, unix milliseconds.
    pub(crate) used: u64,
    /// Seconds after its last use that it is kept.
    pub(crate) ttl: Option<u64>,
    pub(crate) head: String,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) forked_from: Option<(String, String)>,
    /// The place of its next version.
    pub(crate) next: u64,
    /// Versions that it keeps, its head included.
    pub(crate) kept: u64,
    /// Versions that it only remembers.
    pub(crate) known: u64,
}

impl SessionRow {
    /// The moment, in unix milliseconds, from which it is gone if it was used last at `used`.
    pub(crate) fn ends(&self, used: u64) -> Option<u64> {
        self.ttl.map(|ttl| self.used.max(used).saturating_add(ttl.saturating_mul(1000)))
    }
}

/// A version: a snapshot's name, and what is told of it.
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
    /// Of its object; an empty version has none.
    pub(crate) bytes: u64,
    /// What the random numbers of an empty version come from.
    pub(crate) seed: Option<u64>,
    /// How many sessions and responses keep its object.
    pub(crate) kept_by: u64,
    /// How many know this row, those that keep the object included.
    pub(crate) known_by: u64,
}

/// A session's or a version's place in its list of versions.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) at: u64,
    pub(crate) version: String,
    pub(crate) kept: bool,
}

/// A stored response.
#[derive(Clone, Debug)]
pub(crate) struct ResponseRow {
    pub(crate) owner: Owner,
    pub(crate) version: String,
    /// Unix milliseconds; as good as never where there is no bound.
    pub(crate) ends: u64,
    pub(crate) body: Vec<u8>,
}
