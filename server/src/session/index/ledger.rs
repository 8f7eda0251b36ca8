//! The sums of the index in memory, and what is on its way into it: the one place that says whether there is room.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::Owner;

/// How much there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) disk: u64,
    pub(crate) owner: u64,
}

/// What there is.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums {
    /// Bytes of objects that something points to.
    pub(crate) live: u64,
    /// Bytes of objects that nothing points to and that are still there.
    pub(crate) garbage: u64,
    pub(crate) sessions: u64,
    pub(crate) versions: u64,
    pub(crate) owners: HashMap<Owner, u64>,
}

/// What a transaction changed of it.
#[derive(Debug, Default)]
pub(crate) struct Change {
    pub(crate) live: i64,
    pub(crate) garbage: i64,
    pub(crate) sessions: i64,
    pub(crate) versions: i64,
    pub(crate) owners: HashMap<Owner, i64>,
    /// What had been promised for the versions that are counted from now on.
    pub(crate) settled: Vec<Arc<Reservation>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    sums: Sums,
    reserved: u64,
    by_owner: HashMap<Owner, u64>,
}

/// Room for an object that is being written. Dropping it gives the room back.
#[derive(Debug)]
pub(crate) struct Reservation {
    ledger: Ledger,
    owner: Owner,
    bytes: AtomicU64,
}

/// Which bound is in the way, and by how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    Disk { missing: u64 },
    Owner { missing: u64, found: u64 },
}

impl Ledger {
    pub(crate) fn reserve(&self, owner: Owner, bytes: u64, bounds: Bounds) -> Result<Reservation, Short> {
        let mut book = self.lock();
        book.fits(owner, bytes, bounds)?;
        book.reserved += bytes;
        *book.by_owner.entry(owner).or_default() += bytes;
        Ok(Reservation { ledger: self.clone(), owner, bytes: AtomicU64::new(bytes) })
    }

    /// Whether `bytes` more could be reserved now.
    pub(crate) fn fits(&self, owner: Owner, bytes: u64, bounds: Bounds) -> Result<(), Short> {
        self.lock().fits(owner, bytes, bounds)
    }

    /// Takes in what a transaction changed, once it is committed.
    pub(crate) fn apply(&self, mut change: Change) {
        let settled = std::mem::take(&mut change.settled);
        let mut book = self.lock();
        let sums = &mut book.sums;
        for (sum, change) in [
            (&mut sums.live, change.live),
            (&mut sums.garbage, change.garbage),
            (&mut sums.sessions, change.sessions),
            (&mut sums.versions, change.versions),
        ] {
            *sum = sum.saturating_add_signed(change);
        }
        for (owner, change) in change.owners {
            let sum = sums.owners.entry(owner).or_default();
            *sum = sum.saturating_add_signed(change);
            if *sum == 0 {
                sums.owners.remove(&owner);
            }
        }
        // In one step with the sums: what was promised is never counted twice, nor left out.
        for reservation in settled {
            book.release(reservation.owner, reservation.bytes.swap(0, Ordering::SeqCst));
        }
    }

    /// Starts again from what the index says.
    pub(crate) fn replace(&self, sums: Sums) {
        self.lock().sums = sums;
    }

    pub(crate) fn sums<T>(&self, read: impl FnOnce(&Sums) -> T) -> T {
        read(&self.lock().sums)
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn fits(&self, owner: Owner, bytes: u64, bounds: Bounds) -> Result<(), Short> {
        let of = |map: &HashMap<Owner, u64>| map.get(&owner).copied().unwrap_or(0);
        let found = of(&self.sums.owners).saturating_add(of(&self.by_owner)).saturating_add(bytes);
        if found > bounds.owner {
            return Err(Short::Owner { missing: found - bounds.owner, found });
        }
        let found =
            self.sums.live.saturating_add(self.sums.garbage).saturating_add(self.reserved).saturating_add(bytes);
        if found > bounds.disk {
            return Err(Short::Disk { missing: found - bounds.disk });
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
    /// Gives back what is more than `bytes`. Less is never made more.
    pub(crate) fn shrink(&self, bytes: u64) {
        let had = self.bytes.fetch_min(bytes, Ordering::SeqCst);
        if had > bytes {
            self.ledger.lock().release(self.owner, had - bytes);
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
            self.ledger.lock().release(self.owner, bytes);
        }
    }
}
