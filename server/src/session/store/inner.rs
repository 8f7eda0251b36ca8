//! The parts of a store, and helpers that all of its operations use.

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
    /// The times of its operations.
    pub(super) index_times: Arc<Backend>,
    pub(super) objects: Objects,
    pub(super) cache: Arc<Cache>,
    pub(super) leases: Leases,
    pub(super) last_uses: LastUses,
    /// Wakes the sweep when there is garbage.
    pub(super) garbage: Arc<Notify>,
    /// Whether there may be orphans (objects that nothing points to and that are not garbage), so that all objects
    /// must be checked.
    pub(super) orphans: AtomicBool,
    /// Possible orphans by name: writing them, or adding them to the index, failed.
    pub(super) suspects: Mutex<HashSet<VersionId>>,
    /// Held from looking for objects that nothing needs until they are removed. Closing waits for it: the next process may
    /// find such an object, and add a version that needs it again.
    pub(super) removing: tokio::sync::RwLock<()>,
    /// Held while evicting versions, which one task does at a time.
    pub(super) evicting: tokio::sync::Mutex<()>,
    /// Held while leases in a shared index are given back. Closing waits for it.
    pub(super) releasing: Arc<tokio::sync::RwLock<()>>,
    pub(super) counters: Counters,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Wakes the sweep and the probe, which then find the store gone and stop.
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

/// Last uses in unix milliseconds that the index does not contain yet, so that reading a session writes nothing.
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

/// Unix milliseconds.
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

    /// How many versions of a session are kept and listed.
    pub(super) fn bounds(&self) -> Bounds {
        Bounds { keep: self.options.keep_versions, lineage: self.options.lineage }
    }

    /// A test for sessions that must not expire although their rows say so: those in use or used since.
    pub(super) fn exempt(&self) -> Exempt {
        let (leases, last_uses) = (self.leases.clone(), self.last_uses.clone());
        Arc::new(move |name| SessionId::parse(name).is_some_and(|id| leases.in_use(&id) || last_uses.of(&id) > 0))
    }

    /// Whether a session has expired. One in use never has.
    pub(super) fn is_expired(&self, id: &SessionId, row: &SessionRow) -> bool {
        self.has_ended(id, row) && !self.leases.in_use(id)
    }

    /// The same for who holds its lease.
    pub(super) fn has_ended(&self, id: &SessionId, row: &SessionRow) -> bool {
        row.ends(self.last_uses.of(id)).is_some_and(|expiry| expiry <= now())
    }

    pub(super) fn session(&self, id: SessionId, row: SessionRow, head: VersionRow) -> Result<Session, StoreError> {
        let (used, in_use) = (self.last_uses.of(&id), self.leases.in_use(&id));
        to_session(id, row, head, used, in_use)
    }

    /// When a receipt stored now expires, in unix milliseconds.
    pub(super) fn receipt_expiry(&self) -> u64 {
        now().saturating_add(self.options.receipt_ttl.as_millis() as u64)
    }
}

/// A session that has just been created.
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

/// Without its tags, which a session has.
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

/// Runs work to completion even if the caller goes away.
pub(super) async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    // Log lines of the work belong to the caller's request.
    let result = tokio::spawn(work.in_current_span()).await;
    result.unwrap_or_else(|error| Err(StoreError::Unavailable { reason: error.to_string() }))
}
