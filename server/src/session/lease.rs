//! Who uses a session: one at a time, the others in the order they came.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use super::{SessionId, StoreError};

/// When to ask again for a session that is in use.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The sessions in use or waited for; the others have no entry.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leases(Arc<Mutex<HashMap<SessionId, Arc<Place>>>>);

#[derive(Debug, Default)]
struct Place {
    /// Fair: it is handed on in the order in which it was asked for.
    turn: Arc<tokio::sync::Mutex<()>>,
    held: AtomicBool,
}

/// The right to move a session's head. Dropping it hands it on.
#[derive(Debug)]
pub(crate) struct Lease {
    guard: Option<OwnedMutexGuard<()>>,
    claim: Claim,
}

/// An interest in a session's entry, held or waited for: the last one takes the entry away.
#[derive(Debug)]
struct Claim {
    leases: Leases,
    id: SessionId,
    place: Option<Arc<Place>>,
}

impl Leases {
    /// The session's lease, waited for as long as `wait`.
    pub(crate) async fn take(&self, id: &SessionId, wait: Duration) -> Result<Lease, StoreError> {
        let claim = self.claim(id);
        let turn = Arc::clone(&claim.place().turn);
        let guard = if wait.is_zero() {
            turn.try_lock_owned().ok()
        } else {
            tokio::time::timeout(wait, turn.lock_owned()).await.ok()
        };
        let Some(guard) = guard else {
            return Err(StoreError::Busy { retry_after: RETRY_AFTER });
        };
        claim.place().held.store(true, Ordering::SeqCst);
        Ok(Lease { guard: Some(guard), claim })
    }

    /// Whether the session is in use.
    pub(crate) fn held(&self, id: &SessionId) -> bool {
        self.lock().get(id).is_some_and(|place| place.held.load(Ordering::SeqCst))
    }

    fn claim(&self, id: &SessionId) -> Claim {
        let place = Arc::clone(self.lock().entry(id.clone()).or_default());
        Claim { leases: self.clone(), id: id.clone(), place: Some(place) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionId, Arc<Place>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    fn place(&self) -> &Arc<Place> {
        self.place.as_ref().expect("a claim has its place until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Before the next one has it, which would say that it is held.
        self.claim.place().held.store(false, Ordering::SeqCst);
        self.guard = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut places = self.leases.lock();
        self.place = None;
        if places.get(&self.id).is_some_and(|place| Arc::strong_count(place) == 1) {
            places.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_holds_it_the_others_wait_their_turn_and_nothing_stays_behind() {
        let (leases, id) = (Leases::default(), SessionId::new());
        let first = leases.take(&id, Duration::ZERO).await.expect("it is free");
        assert!(leases.held(&id));
        assert!(matches!(leases.take(&id, Duration::ZERO).await, Err(StoreError::Busy { .. })));
        assert!(matches!(leases.take(&id, Duration::from_millis(5)).await, Err(StoreError::Busy { .. })));
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..10 {
            let (leases, id, told) = (leases.clone(), id.clone(), told.clone());
            tokio::spawn(async move {
                let _lease = leases.take(&id, Duration::from_secs(10)).await.expect("its turn comes");
                told.send(number).expect("somebody listens");
            });
            tokio::task::yield_now().await;
        }
        drop((first, told));
        for number in 0..10 {
            assert_eq!(order.recv().await, Some(number));
        }
        assert_eq!(order.recv().await, None);
        assert!(!leases.held(&id) && leases.lock().is_empty());
    }
}
