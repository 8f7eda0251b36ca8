//! Leases: one turn at a time uses a session, and the others wait in order of arrival.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use super::error::StoreError;
use super::id::SessionId;

/// Suggested delay before a client asks again for a session in use.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The sessions that are in use or waited for. Others have no entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leases(Arc<Mutex<HashMap<SessionId, Arc<Entry>>>>);

#[derive(Debug, Default)]
struct Entry {
    /// A fair lock: waiters get it in the order in which they asked.
    turn: Arc<tokio::sync::Mutex<()>>,
    in_use: AtomicBool,
}

/// The right to move a session's head, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lease {
    guard: Option<OwnedMutexGuard<()>>,
    claim: Claim,
}

/// Counts as one user of a session's entry, holding or waiting. The last one removes the entry.
#[derive(Debug)]
struct Claim {
    leases: Leases,
    id: SessionId,
    entry: Option<Arc<Entry>>,
}

impl Leases {
    /// Takes the session's lease, waiting for at most `wait`.
    pub(crate) async fn take(&self, id: &SessionId, wait: Duration) -> Result<Lease, StoreError> {
        let claim = self.claim(id);
        let turn = Arc::clone(&claim.entry().turn);
        let guard = if wait.is_zero() {
            turn.try_lock_owned().ok()
        } else {
            tokio::time::timeout(wait, turn.lock_owned()).await.ok()
        };
        let Some(guard) = guard else {
            return Err(StoreError::Busy { retry_after: RETRY_AFTER });
        };
        claim.entry().in_use.store(true, Ordering::SeqCst);
        Ok(Lease { guard: Some(guard), claim })
    }

    /// Whether the session is in use.
    pub(crate) fn in_use(&self, id: &SessionId) -> bool {
        self.lock().get(id).is_some_and(|entry| entry.in_use.load(Ordering::SeqCst))
    }

    fn claim(&self, id: &SessionId) -> Claim {
        let entry = Arc::clone(self.lock().entry(id.clone()).or_default());
        Claim { leases: self.clone(), id: id.clone(), entry: Some(entry) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Entry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    fn entry(&self) -> &Arc<Entry> {
        self.entry.as_ref().expect("only `drop` takes the entry")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Cleared before the lock is passed on, because its next holder sets it.
        self.claim.entry().in_use.store(false, Ordering::SeqCst);
        self.guard = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut entries = self.leases.lock();
        self.entry = None;
        if entries.get(&self.id).is_some_and(|entry| Arc::strong_count(entry) == 1) {
            entries.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_get_the_lease_in_order_and_no_entry_remains() {
        let (leases, id) = (Leases::default(), SessionId::new());
        let first = leases.take(&id, Duration::ZERO).await.expect("the session is free");
        assert!(leases.in_use(&id));
        assert!(matches!(leases.take(&id, Duration::ZERO).await, Err(StoreError::Busy { .. })));
        assert!(matches!(leases.take(&id, Duration::from_millis(5)).await, Err(StoreError::Busy { .. })));
        let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..10 {
            let (leases, id, sender) = (leases.clone(), id.clone(), sender.clone());
            tokio::spawn(async move {
                let _lease = leases.take(&id, Duration::from_secs(10)).await.expect("the lease is passed on");
                sender.send(number).expect("the receiver is open");
            });
            tokio::task::yield_now().await;
        }
        drop((first, sender));
        for number in 0..10 {
            assert_eq!(order.recv().await, Some(number));
        }
        assert_eq!(order.recv().await, None);
        assert!(!leases.in_use(&id) && leases.lock().is_empty());
    }
}
