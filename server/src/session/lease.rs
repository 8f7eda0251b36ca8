//! Session leases: one turn at a time uses a session, and other turns wait in order of arrival.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use super::error::StoreError;
use super::id::SessionId;
use crate::sync::{AtomicBool, Mutex, MutexGuard, timeout};

/// The delay suggested to clients before they retry a session that is in use.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The sessions that are in use or waited for. Other sessions have no entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leases(Arc<Mutex<HashMap<SessionId, Arc<Entry>>>>);

#[derive(Debug, Default)]
struct Entry {
    /// A fair lock: waiters acquire it in the order in which they asked.
    turn: Arc<tokio::sync::Mutex<()>>,
    in_use: AtomicBool,
}

/// The right to move a session's head; dropping it releases the session.
#[derive(Debug)]
pub(crate) struct Lease {
    guard: Option<OwnedMutexGuard<()>>,
    claim: Claim,
}

/// Counts as one user of a session's entry, whether it holds the lease or waits. The last claim removes the entry.
#[derive(Debug)]
struct Claim {
    leases: Leases,
    id: SessionId,
    entry: Option<Arc<Entry>>,
}

impl Leases {
    /// Takes the session's lease, waiting at most `wait`.
    pub(crate) async fn take(&self, id: &SessionId, wait: Duration) -> Result<Lease, StoreError> {
        let claim = self.claim(id);
        let turn = Arc::clone(&claim.entry().turn);
        let guard =
            if wait.is_zero() { turn.try_lock_owned().ok() } else { timeout(wait, turn.lock_owned()).await.ok() };
        let Some(guard) = guard else {
            return Err(StoreError::Busy { retry_after: RETRY_AFTER });
        };
        claim.entry().in_use.store(true, Ordering::SeqCst);
        Ok(Lease { guard: Some(guard), claim })
    }

    /// Returns whether the session is in use.
    pub(crate) fn in_use(&self, id: &SessionId) -> bool {
        self.lock().get(id).is_some_and(|entry| entry.in_use.load(Ordering::SeqCst))
    }

    /// Returns the sessions that are in use.
    pub(crate) fn all_in_use(&self) -> Vec<SessionId> {
        let used = |(id, entry): (&SessionId, &Arc<Entry>)| entry.in_use.load(Ordering::SeqCst).then(|| id.clone());
        self.lock().iter().filter_map(used).collect()
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

impl Lease {
    /// Marks the session as no longer in use, but does not pass the lease on yet.
    pub(crate) fn end(&self) {
        self.claim.entry().in_use.store(false, Ordering::SeqCst);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // This must happen before the lock is passed on, because the next holder sets it.
        self.end();
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
    use std::collections::VecDeque;
    use std::pin::Pin;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::sync::{block_on, check, thread};

    const LONG: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(5);

    fn poll<F: Future>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn waiters_get_the_lease_in_order_and_no_entry_remains() {
        check(|| {
            block_on(async {
                let (leases, id) = (Leases::default(), SessionId::new());
                let first = leases.take(&id, Duration::ZERO).await.expect("the session is free");
                assert!(leases.in_use(&id));
                for wait in [Duration::ZERO, SHORT] {
                    assert!(matches!(leases.take(&id, wait).await, Err(StoreError::Busy { .. })));
                }
                let mut waiting: VecDeque<_> = (0..10).map(|_| Box::pin(leases.take(&id, LONG))).collect();
                assert!(waiting.iter_mut().all(|waiter| poll(waiter).is_none()));
                // A waiter that gives up is skipped.
                drop(waiting.remove(3));
                drop(first);
                while let Some(mut next) = waiting.pop_front() {
                    let lease = poll(&mut next).expect("the lease is passed on").expect("a lease");
                    assert!(waiting.iter_mut().all(|waiter| poll(waiter).is_none()));
                    drop(lease);
                }
                assert!(!leases.in_use(&id) && leases.lock().is_empty());
            });
        });
    }

    #[test]
    fn a_session_has_one_holder_and_is_in_use_as_long() {
        check(|| {
            let (leases, id) = (Leases::default(), SessionId::new());
            let holders = Arc::new(AtomicUsize::new(0));
            let threads = [Duration::ZERO, SHORT, LONG, LONG].map(|wait| {
                let (leases, id, holders) = (leases.clone(), id.clone(), Arc::clone(&holders));
                thread::spawn(move || {
                    let taken = block_on(leases.take(&id, wait));
                    assert!(taken.is_ok() || wait < LONG, "the lease is passed on");
                    let Ok(lease) = taken else { return };
                    assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                    thread::yield_now();
                    assert!(leases.in_use(&id));
                    holders.fetch_sub(1, Ordering::SeqCst);
                    drop(lease);
                })
            });
            for thread in threads {
                thread.join().expect("the thread ends");
            }
            assert!(!leases.in_use(&id) && leases.lock().is_empty());
        });
    }
}
