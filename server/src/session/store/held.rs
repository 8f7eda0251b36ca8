//! Sessions in use: each has a lease of this server, and one in the index if other servers share that.

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

/// Pauses between attempts to take the lease of a session that another server has.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// How long a request waits at least: another server gives a lease back after it has answered.
const RELEASING: Duration = Duration::from_millis(250);

/// Time limit for giving a lease back, which the next request of this server waits for.
const RELEASE: Duration = Duration::from_secs(2);

/// How often the uses of a session that may expire are recorded in a shared index.
const RECORDED_EVERY: u64 = 1000;

/// A session in use. When this is dropped, its last use is recorded, and its leases are given back.
pub(super) struct Held {
    lease: Option<Lease>,
    last_uses: LastUses,
    id: SessionId,
    /// If other servers share the index.
    shared: Option<SharedLease>,
}

/// What gives a lease in the index back.
struct SharedLease {
    index: Arc<dyn Index>,
    /// Whether this server may have it.
    is_taken: bool,
    /// Whether another server may remove the session some time after its last use.
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
        // The next request of this server waits until the index has its lease back: it would otherwise take the lease first,
        // and this would then give that one back.
        lease.end();
        let (id, closing) = (self.id.clone(), Arc::clone(&shared.releasing).try_read_owned());
        shared.runtime.clone().spawn(async move {
            let release = async {
                if shared.expires
                    && let Err(error) = shared.index.record_uses(HashMap::from([(id.clone(), now())])).await
                {
                    tracing::debug!(%error, "the last use of a session is recorded later");
                }
                shared.index.release(&id).await;
            };
            // An index that is out of reach gives the lease back later.
            let _ = timeout(RELEASE, release).await;
            drop((lease, closing));
        });
    }
}

impl Inner {
    /// Takes a session's leases, and waits at most `wait` while it is in use, here or on another server.
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
            // Goes on if the request goes away: the index could otherwise give the lease to nobody.
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

    /// Begins to use a session, whose row was read after its lease was taken.
    pub(super) async fn begun(&self, held: &mut Held, row: &SessionRow) -> Result<(), StoreError> {
        let Some(shared) = &mut held.shared else { return Ok(()) };
        shared.expires = row.ttl.is_some();
        self.record_use(&held.id, row).await
    }

    /// Records a use of a session with this row: at once if another server could otherwise remove it.
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
    /// Takes the lease in the index; false if another server has it.
    async fn take(&mut self) -> Result<bool, StoreError> {
        let Some(shared) = &mut self.shared else { return Ok(true) };
        let taken = shared.index.lease(&self.id).await;
        // After a failure it may have it.
        shared.is_taken = !matches!(taken, Ok(false));
        taken
    }
}
