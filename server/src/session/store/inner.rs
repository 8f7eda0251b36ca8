//! The parts of a store, and helpers shared by all of its operations.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::Notify;
use tracing::Instrument;

use super::types::{Session, SnapshotCodec, StoreOptions, Version};
use crate::session::backend::Backend;
use crate::session::cache::Cache;
use crate::session::error::StoreError;
use crate::session::id::{SessionId, VersionId};
use crate::session::index::{Bounds, Exempt, Index, Limits, SessionRow, VersionRow};
use crate::session::lease::Leases;
use crate::session::objects::Objects;

/// A store of sessions. Clones share the same store.
#[derive(Clone)]
pub struct Store {
    pub(super) inner: Arc<Inner>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("options", &self.inner.options).finish_non_exhaustive()
    }
}

pub(super) struct Inner {
    pub(super) options: StoreOptions,
    pub(super) codec: Arc<dyn SnapshotCodec>,
    pub(super) index: Arc<dyn Index>,
    /// The latencies of the index's operations.
    pub(super) index_times: Arc<Backend>,
    pub(super) objects: Objects,
    pub(super) cache: Arc<Cache>,
    pub(super) leases: Leases,
    pub(super) last_uses: LastUses,
    /// Wakes the sweep when there is garbage.
    pub(super) garbage: Arc<Notify>,
    /// Whether there may be orphans (objects that nothing points to and that are not listed as garbage), so that all
    /// objects must be checked.
    pub(super) orphans: AtomicBool,
    /// Possible orphans by name: writing them, or adding them to the index, failed.
    pub(super) suspects: Mutex<HashSet<VersionId>>,
    /// Held from the search for unneeded objects until they are removed. Closing waits for it: the next process may
    /// find such an object, and add a version that needs it again.
    pub(super) removing: tokio::sync::RwLock<()>,
    /// Held while versions are evicted; one task does so at a time.
    pub(super) evicting: tokio::sync::Mutex<()>,
    /// Held while leases in a shared index are released. Closing waits for it.
    pub(super) releasing: Arc<tokio::sync::RwLock<()>>,
    pub(super) counters: Counters,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Wakes the sweep and the probe, which then notice that the store is gone, and stop.
        self.garbage.notify_one();
        self.objects.backend().wake();
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) hits_memory: AtomicU64,
    pub(super) hits_disk: AtomicU64,
    pub(super) commits: AtomicU64,
    pub(super) conflicts: AtomicU64,
    pub(super) forks: AtomicU64,
    pub(super) collected: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) refused: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Last uses, in unix milliseconds, that are not in the index yet. They are kept in memory so that reading a session
/// writes nothing.
#[derive(Clone, Debug, Default)]
pub(super) struct LastUses(Arc<Mutex<HashMap<SessionId, u64>>>);

impl LastUses {
    pub(super) fn record(&self, id: &SessionId) {
        self.lock().insert(id.clone(), now());
    }

    pub(super) fn of(&self, id: &SessionId) -> u64 {
        self.lock().get(id).copied().unwrap_or(0)
    }

    pub(super) fn forget(&self, id: &SessionId) {
        self.lock().remove(id);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the current time in unix milliseconds.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as u64)
}

/// Parses an id from the index.
pub(super) fn version_id(text: &str) -> Result<VersionId, StoreError> {
    VersionId::parse(text).ok_or_else(|| invalid_id(text))
}

pub(super) fn session_id(text: &str) -> Result<SessionId, StoreError> {
    SessionId::parse(text).ok_or_else(|| invalid_id(text))
}

fn invalid_id(text: &str) -> StoreError {
    StoreError::Unavailable { reason: format!("the index contains an invalid id: {text:?}") }
}

impl Inner {
    pub(super) fn limits(&self) -> Limits {
        Limits { disk: self.options.disk_bytes, owner: self.options.owner_bytes }
    }

    /// Returns how many versions of a session are kept and listed.
    pub(super) fn bounds(&self) -> Bounds {
        Bounds { keep: self.options.keep_versions, lineage: self.options.lineage }
    }

    /// Returns a test for sessions that must not expire although their rows say so: they are in use, or were used since
    /// their rows were written.
    pub(super) fn exempt(&self) -> Exempt {
        let (leases, last_uses) = (self.leases.clone(), self.last_uses.clone());
        Arc::new(move |name| SessionId::parse(name).is_some_and(|id| leases.in_use(&id) || last_uses.of(&id) > 0))
    }

    /// Returns whether a session has expired. A session in use never has.
    pub(super) fn is_expired(&self, id: &SessionId, row: &SessionRow) -> bool {
        self.has_ended(id, row) && !self.leases.in_use(id)
    }

    /// Like [`Self::is_expired`], for the holder of the session's lease.
    pub(super) fn has_ended(&self, id: &SessionId, row: &SessionRow) -> bool {
        row.ends(self.last_uses.of(id)).is_some_and(|expiry| expiry <= now())
    }

    pub(super) fn session(&self, id: SessionId, row: SessionRow, head: VersionRow) -> Result<Session, StoreError> {
        let (used, in_use) = (self.last_uses.of(&id), self.leases.in_use(&id));
        to_session(id, row, head, used, in_use)
    }

    /// Returns when a receipt stored now expires, in unix milliseconds.
    pub(super) fn receipt_expiry(&self) -> u64 {
        now().saturating_add(self.options.receipt_ttl.as_millis() as u64)
    }
}

/// Describes a session that has just been created.
pub(super) fn new_session(id: &SessionId, row: &SessionRow, head: &VersionRow) -> Result<Session, StoreError> {
    to_session(id.clone(), row.clone(), head.clone(), 0, false)
}

fn to_session(
    id: SessionId,
    row: SessionRow,
    head: VersionRow,
    used: u64,
    in_use: bool,
) -> Result<Session, StoreError> {
    let forked_from = match row.forked_from.as_ref() {
        Some((session, version)) => Some((session_id(session)?, version_id(version)?)),
        None => None,
    };
    let mut tags = BTreeMap::new();
    for (name, version) in &row.tags {
        tags.insert(name.clone(), version_id(version)?);
    }
    Ok(Session {
        head: Version { tags: row.tags_of(&row.head), ..version(&row.head, head, true)? },
        created: row.created,
        updated: row.updated,
        expires: row.ends(used).map(|ends| ends / 1000),
        ttl: row.ttl,
        in_use,
        metadata: row.metadata,
        forked_from,
        tags,
        id,
    })
}

/// Describes a version without its tags, which belong to a session.
pub(super) fn version(id: &str, row: VersionRow, kept: bool) -> Result<Version, StoreError> {
    Ok(Version {
        id: version_id(id)?,
        parent: row.parent.as_deref().map(version_id).transpose()?,
        tokens: row.tokens,
        time: row.time,
        label: row.label,
        kind: row.kind,
        prompt_tokens: row.prompt_tokens,
        completion_tokens: row.completion_tokens,
        bytes: row.bytes,
        kept,
        session: row.session.as_deref().map(session_id).transpose()?,
        tags: Vec::new(),
    })
}

/// Runs work to completion even if the caller is canceled.
pub(super) async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    // Log lines of the work belong to the caller's request.
    let result = tokio::spawn(work.in_current_span()).await;
    result.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}
