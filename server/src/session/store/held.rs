//! Sessions in use: each has a lease on this server, and one in the index if servers share the index.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::RwLock;
use tokio::time::{Instant, sleep, timeout};

use super::inner::{Inner, LastUses, detached, now};
use crate::session::backend::pauses;
use crate::session::error::StoreError;
use crate::session::id::SessionId;
use crate::session::index::{Index, SessionRow};
use crate::session::lease::{Lease, RETRY_AFTER};

/// Pauses between attempts to take the lease of a session that another server holds.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Minimum time that a request waits: another server releases its lease only after it has answered.
const RELEASING: Duration = Duration::from_millis(250);

/// Time limit for releasing a lease; the next request of this server waits for the release.
const RELEASE: Duration = Duration::from_secs(2);

/// Minimum interval, in milliseconds, between recorded uses of a session with a time to live in a shared index.
const RECORDED_EVERY: u64 = 1000;

/// A session in use. Dropping it records the last use and releases the leases.
pub(super) struct Held {
    lease: Option<Lease>,
    last_uses: LastUses,
    id: SessionId,
    /// The lease in the index, if servers share the index.
    shared: Option<SharedLease>,
}

/// What is needed to release a lease in the index.
struct SharedLease {
    index: Arc<dyn Index>,
    /// Whether this server may hold the lease.
    is_taken: bool,
    /// Whether the session has a time to live, so that another server may remove it some time after its last use.
    expires: bool,
    releasing: Arc<RwLock<()>>,
    runtime: Handle,
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(lease) = self.lease.take() else { return };
        let shared = self.shared.take();
        if shared.as_ref().is_some_and(|shared| !shared.is_taken) {
            return;
        }
        // Recorded first, so that a session never looks both unused and free.
        self.last_uses.record(&self.id);
        let Some(shared) = shared else { return };
        // The local lease is kept until the one in the index is released. Otherwise the next request of this server
        // could take the lease in the index first, and this release would then give it away.
        lease.end();
        let (id, closing) = (self.id.clone(), Arc::clone(&shared.releasing).try_read_owned());
        shared.runtime.clone().spawn(async move {
            if shared.expires {
                let used = shared.index.record_uses(HashMap::from([(id.clone(), now())]));
                if !matches!(timeout(RELEASE, used).await, Ok(Ok(()))) {
                    tracing::debug!(session = %id, "the last use of a session is recorded later");
                }
            }
            // Also if the last use took too long: if the index is unreachable, it releases the lease later, but only if
            // it has been asked to.
            let _ = timeout(RELEASE, shared.index.release(&id)).await;
            drop((lease, closing));
        });
    }
}

impl Inner {
    /// Takes a session's leases; waits at most `wait` while the session is in use, here or on another server.
    pub(super) async fn lease(&self, id: &SessionId, wait: Duration) -> Result<Held, StoreError> {
        let began = Instant::now();
        let lease = self.leases.take(id, wait).await?;
        let shared = self.index.is_shared().then(|| SharedLease {
            index: Arc::clone(&self.index),
            is_taken: false,
            expires: false,
            releasing: Arc::clone(&self.releasing),
            runtime: Handle::current(),
        });
        let mut held = Held { lease: Some(lease), last_uses: self.last_uses.clone(), id: id.clone(), shared };
        if held.shared.is_none() {
            return Ok(held);
        }
        let wait = wait.max(RELEASING);
        for pause in pauses(FIRST_PAUSE, LONGEST_PAUSE) {
            // Runs to completion even if the request is canceled: otherwise the index could grant a lease that nobody
            // releases.
            let taken;
            (held, taken) = detached(async move {
                let taken = held.take().await;
                Ok((held, taken))
            })
            .await?;
            let left = wait.saturating_sub(began.elapsed());
            if taken? {
                return Ok(held);
            }
            if left.is_zero() {
                break;
            }
            sleep(pause.min(left)).await;
        }
        Err(StoreError::Busy { retry_after: RETRY_AFTER })
    }

    /// Begins to use a session. `row` was read after the lease was taken.
    pub(super) async fn begun(&self, held: &mut Held, row: &SessionRow) -> Result<(), StoreError> {
        let Some(shared) = &mut held.shared else { return Ok(()) };
        shared.expires = row.ttl.is_some();
        self.record_use(&held.id, row).await
    }

    /// Records a use of a session: at once if another server could otherwise remove the session.
    pub(super) async fn record_use(&self, id: &SessionId, row: &SessionRow) -> Result<(), StoreError> {
        if row.ttl.is_none() || !self.index.is_shared() {
            self.last_uses.record(id);
        } else if row.used.saturating_add(RECORDED_EVERY) <= now() {
            self.index.record_uses(HashMap::from([(id.clone(), now())])).await?;
        }
        Ok(())
    }
}

impl Held {
    /// Takes the lease in the index; returns false if another server holds it.
    async fn take(&mut self) -> Result<bool, StoreError> {
        let Some(shared) = &mut self.shared else { return Ok(true) };
        let taken = shared.index.lease(&self.id).await;
        // After a failure, this server may hold the lease.
        shared.is_taken = !matches!(taken, Ok(false));
        taken
    }
}
