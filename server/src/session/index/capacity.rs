//! Accounting of used and reserved space, in memory. Every decision about space is made here.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::error::StoreError;
use crate::session::id::Owner;

/// Limits, in bytes of objects, texts and receipts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) disk: u64,
    pub(crate) owner: u64,
}

/// Totals of what the index contains.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    /// Bytes of objects that something points to.
    pub(crate) live: u64,
    /// Bytes of garbage: objects that nothing points to and that are not removed yet.
    pub(crate) garbage: u64,
    pub(crate) sessions: u64,
    pub(crate) versions: u64,
    /// Bytes of receipts.
    pub(crate) receipts: u64,
    /// Bytes of texts.
    pub(crate) texts: u64,
    /// Bytes of each owner's versions, receipts and texts.
    pub(crate) owners: HashMap<Owner, u64>,
    /// The owners that have anything that may be evicted.
    pub(crate) evictable: HashSet<Owner>,
}

impl Totals {
    /// Returns the number of owners that store more than `limit`.
    pub(crate) fn above(&self, limit: u64) -> usize {
        self.owners.values().filter(|bytes| **bytes > limit).count()
    }
}

/// The change that a transaction makes to [`Totals`].
#[derive(Debug, Default)]
pub(crate) struct Change {
    pub(crate) live: i64,
    pub(crate) garbage: i64,
    pub(crate) sessions: i64,
    pub(crate) versions: i64,
    pub(crate) receipts: i64,
    pub(crate) texts: i64,
    pub(crate) owners: HashMap<Owner, i64>,
    /// Whether an owner has anything that may be evicted, for the owners that the transaction may have affected.
    pub(crate) evictable: HashMap<Owner, bool>,
    /// Reservations for versions that the totals include from now on.
    pub(crate) fulfilled: Vec<Arc<Reservation>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Capacity(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    totals: Totals,
    reserved: u64,
    by_owner: HashMap<Owner, u64>,
    /// The owners with anything to evict, ordered by the bytes that they use. With it, the time to find the owner that
    /// uses most does not grow linearly with the number of owners or sessions.
    ranked: BTreeSet<(u64, Owner)>,
}

/// The owners whose versions may be evicted.
#[derive(Clone, Debug)]
pub(crate) struct Victims {
    /// The owner that needs space, and what it would use with that space. It may lose any of its evictable versions.
    pub(crate) writer: (u64, Owner),
    /// The bytes that each owner may use whatever the others do. Other owners lose only what they use beyond it.
    share: u64,
    /// All owners; `None` if only the writer may lose versions.
    others: Option<Capacity>,
}

/// Space reserved for an object, text or receipt that is not stored yet. Dropping it releases the space.
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

impl Shortfall {
    /// Returns the error that refuses a request for lack of space.
    pub(crate) fn refusal(self, limits: Limits) -> StoreError {
        match self {
            Self::Owner { found, .. } => {
                StoreError::Quota { quota: "bytes of snapshots and texts", bound: limits.owner, found }
            }
            Self::Disk { missing } => {
                let bound = limits.disk;
                StoreError::Full {
                    reason: format!("snapshots and texts may take {bound} bytes in all, and {missing} more are needed"),
                }
            }
        }
    }
}

impl Capacity {
    pub(crate) fn reserve(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<Reservation, Shortfall> {
        let mut state = self.lock();
        state.fits(owner, bytes, limits)?;
        state.update(owner, |state| {
            state.reserved += bytes;
            *state.by_owner.entry(owner).or_default() += bytes;
        });
        Ok(Reservation { capacity: self.clone(), owner, bytes: AtomicU64::new(bytes) })
    }

    /// Checks whether `bytes` more could be reserved now.
    pub(crate) fn fits(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<(), Shortfall> {
        self.lock().fits(owner, bytes, limits)
    }

    /// Returns the owners to evict from if `missing` bytes must be freed because `writer` needs `needed` bytes that it
    /// has not reserved.
    pub(crate) fn victims(&self, writer: Owner, needed: u64, missing: u64) -> Victims {
        let state = self.lock();
        let used = state.used(writer);
        let owners = state.owners() + usize::from(used == 0);
        let Totals { live, receipts, texts, .. } = &state.totals;
        let total = [*receipts, *texts, state.reserved, needed].into_iter().fold(*live, u64::saturating_add);
        // `missing` is what does not fit, so the rest is the usable disk, which may be smaller than its budget.
        let share = total.saturating_sub(missing) / owners as u64;
        Victims { writer: (used.saturating_add(needed), writer), share, others: Some(self.clone()) }
    }

    /// Applies the changes of a committed transaction.
    pub(crate) fn apply(&self, mut change: Change) {
        let fulfilled = std::mem::take(&mut change.fulfilled);
        let mut state = self.lock();
        let totals = &mut state.totals;
        for (sum, change) in [
            (&mut totals.live, change.live),
            (&mut totals.garbage, change.garbage),
            (&mut totals.sessions, change.sessions),
            (&mut totals.versions, change.versions),
            (&mut totals.receipts, change.receipts),
            (&mut totals.texts, change.texts),
        ] {
            *sum = sum.saturating_add_signed(change);
        }
        for (owner, change) in change.owners {
            state.update(owner, |state| {
                let sum = state.totals.owners.entry(owner).or_default();
                *sum = sum.saturating_add_signed(change);
                if *sum == 0 {
                    state.totals.owners.remove(&owner);
                }
            });
        }
        for (owner, evictable) in change.evictable {
            state.update(owner, |state| {
                let owners = &mut state.totals.evictable;
                let _ = if evictable { owners.insert(owner) } else { owners.remove(&owner) };
            });
        }
        // Done under the same lock as the totals, so that no byte is counted twice or missed.
        for reservation in fulfilled {
            state.release(reservation.owner, reservation.bytes.swap(0, Ordering::SeqCst));
        }
    }

    /// Replaces the totals after the index is opened.
    pub(crate) fn replace(&self, mut totals: Totals) {
        // An owner of empty sessions has nothing stored.
        totals.owners.retain(|_, bytes| *bytes > 0);
        let mut state = self.lock();
        state.ranked.clear();
        let owners = totals.evictable.clone();
        state.totals = totals;
        for owner in owners {
            state.update(owner, |_| {});
        }
    }

    pub(crate) fn totals<T>(&self, read: impl FnOnce(&Totals) -> T) -> T {
        read(&self.lock().totals)
    }

    /// Returns the bytes that all owners have reserved.
    #[cfg(test)]
    pub(crate) fn reserved(&self) -> u64 {
        let state = self.lock();
        assert_eq!(state.by_owner.values().sum::<u64>(), state.reserved);
        state.reserved
    }

    /// Returns the evictable owners, ordered by the bytes that they use.
    #[cfg(test)]
    pub(crate) fn ranked(&self) -> Vec<(u64, Owner)> {
        self.lock().ranked.iter().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn fits(&self, owner: Owner, bytes: u64, limits: Limits) -> Result<(), Shortfall> {
        let found = self.used(owner).saturating_add(bytes);
        if found > limits.owner {
            return Err(Shortfall::Owner { missing: found - limits.owner, found });
        }
        let Totals { live, garbage, receipts, texts, .. } = &self.totals;
        let found = [*garbage, *receipts, *texts, self.reserved, bytes].into_iter().fold(*live, u64::saturating_add);
        if found > limits.disk {
            return Err(Shortfall::Disk { missing: found - limits.disk });
        }
        Ok(())
    }

    /// Returns the bytes that an owner has stored and reserved.
    fn used(&self, owner: Owner) -> u64 {
        let of = |map: &HashMap<Owner, u64>| map.get(&owner).copied().unwrap_or(0);
        of(&self.totals.owners).saturating_add(of(&self.by_owner))
    }

    /// Returns the number of owners that have stored or reserved anything.
    fn owners(&self) -> usize {
        let stored = &self.totals.owners;
        stored.len() + self.by_owner.keys().filter(|owner| !stored.contains_key(owner)).count()
    }

    /// Changes what an owner uses, and updates its place in the order.
    fn update(&mut self, owner: Owner, change: impl FnOnce(&mut Self)) {
        self.ranked.remove(&(self.used(owner), owner));
        change(self);
        if self.totals.evictable.contains(&owner) {
            self.ranked.insert((self.used(owner), owner));
        }
    }

    fn release(&mut self, owner: Owner, bytes: u64) {
        self.update(owner, |state| {
            state.reserved -= bytes;
            if let Some(reserved) = state.by_owner.get_mut(&owner) {
                *reserved -= bytes;
                if *reserved == 0 {
                    state.by_owner.remove(&owner);
                }
            }
        });
    }
}

impl Victims {
    /// Only one owner, which loses whatever is needed.
    pub(crate) fn only(owner: Owner) -> Self {
        Self { writer: (0, owner), share: 0, others: None }
    }

    /// Returns whether an owner that uses this many bytes may lose versions.
    pub(crate) fn may_lose(&self, (used, owner): (u64, Owner)) -> bool {
        owner == self.writer.1 || used > self.share
    }

    /// Returns the next owner that may lose versions, in descending order of bytes used, after `after`; the writer is
    /// left out.
    pub(crate) fn next(&self, after: Option<(u64, Owner)>) -> Option<(u64, Owner)> {
        let state = self.others.as_ref()?.lock();
        let below = state.ranked.range((Bound::Unbounded, after.map_or(Bound::Unbounded, Bound::Excluded)));
        let next = below.rev().find(|(_, owner)| *owner != self.writer.1).copied();
        next.filter(|next| self.may_lose(*next))
    }
}

impl Reservation {
    /// Shrinks the reservation to `bytes`, and releases the rest.
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
