//! How much space is used and reserved, in memory. Every decision about space is made here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::id::Owner;

/// Limits, in bytes of objects.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) disk: u64,
    pub(crate) owner: u64,
}

/// What the index contains.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    /// Bytes of objects that something points to.
    pub(crate) live: u64,
    /// Bytes of objects that nothing points to and that are not removed yet.
    pub(crate) garbage: u64,
    pub(crate) sessions: u64,
    pub(crate) versions: u64,
    /// Bytes of each owner's versions.
    pub(crate) owners: HashMap<Owner, u64>,
}

/// The difference that a transaction makes to [`Totals`].
#[derive(Debug, Default)]
pub(crate) struct Change {
    pub(crate) live: i64,
    pub(crate) garbage: i64,
    pub(crate) sessions: i64,
    pub(crate) versions: i64,
    pub(crate) owners: HashMap<Owner, i64>,
    /// Reservations for versions that are part of the totals from now on.
    pub(crate) fulfilled: Vec<Arc<Reservation>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Capacity(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    totals: Totals,
    reserved: u64,
    by_owner: HashMap<Owner, u64>,
}

/// Space for an object that is being written. Dropping it releases the space.
#[derive(Debug)]
pub(crate) struct Reservation {
    capacity: Capacity,
    owner: Owner,
    bytes: AtomicU64,
}

/// The limit that is exceeded, and by how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortfall {
    Disk { missing: u64 },
    Owner { missing: u64, found: u64 },
}

impl Capacity {
    pub(crate) fn reserve(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<Reservation, Shortfall> {
        let mut state = self.lock();
        state.fits(owner, bytes, limits)?;
        state.reserved += bytes;
        *state.by_owner.entry(owner).or_default() += bytes;
        Ok(Reservation { capacity: self.clone(), owner, bytes: AtomicU64::new(bytes) })
    }

    /// Whether `bytes` more could be reserved now.
    pub(crate) fn fits(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<(), Shortfall> {
        self.lock().fits(owner, bytes, limits)
    }

    /// Adds what a committed transaction changed.
    pub(crate) fn apply(&self, mut change: Change) {
        let fulfilled = std::mem::take(&mut change.fulfilled);
        let mut state = self.lock();
        let totals = &mut state.totals;
        for (sum, change) in [
            (&mut totals.live, change.live),
            (&mut totals.garbage, change.garbage),
            (&mut totals.sessions, change.sessions),
            (&mut totals.versions, change.versions),
        ] {
            *sum = sum.saturating_add_signed(change);
        }
        for (owner, change) in change.owners {
            let sum = totals.owners.entry(owner).or_default();
            *sum = sum.saturating_add_signed(change);
            if *sum == 0 {
                totals.owners.remove(&owner);
            }
        }
        // Under the same lock as the totals, so that no byte is counted twice or missed.
        for reservation in fulfilled {
            state.release(reservation.owner, reservation.bytes.swap(0, Ordering::SeqCst));
        }
    }

    /// Replaces the totals after the index is opened.
    pub(crate) fn replace(&self, totals: Totals) {
        self.lock().totals = totals;
    }

    pub(crate) fn totals<T>(&self, read: impl FnOnce(&Totals) -> T) -> T {
        read(&self.lock().totals)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fits(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<(), Shortfall> {
        let of = |map: &HashMap<Owner, u64>| map.get(&owner).copied().unwrap_or(0);
        let found = of(&self.totals.owners).saturating_add(of(&self.by_owner)).saturating_add(bytes);
        if found > limits.owner {
            return Err(Shortfall::Owner { missing: found - limits.owner, found });
        }
        let found =
            self.totals.live.saturating_add(self.totals.garbage).saturating_add(self.reserved).saturating_add(bytes);
        if found > limits.disk {
            return Err(Shortfall::Disk { missing: found - limits.disk });
        }
        Ok(())
    }

    fn release(&mut self, owner: Owner, bytes: u64) {
        self.reserved -= bytes;
        if let Some(reserved) = self.by_owner.get_mut(&owner) {
            *reserved -= bytes;
            if *reserved == 0 {
                self.by_owner.remove(&owner);
            }
        }
    }
}

impl Reservation {
    /// Releases what exceeds `bytes`.
    pub(crate) fn shrink(&self, bytes: u64) {
        let had = self.bytes.fetch_min(bytes, Ordering::SeqCst);
        if had > bytes {
            self.capacity.lock().release(self.owner, had - bytes);
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::SeqCst)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let bytes = self.bytes.swap(0, Ordering::SeqCst);
        if bytes > 0 {
            self.capacity.lock().release(self.owner, bytes);
        }
    }
}
