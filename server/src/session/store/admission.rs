//! Reserves space for snapshots, evicting older versions if necessary.

use std::sync::Arc;

use super::inner::{Inner, Store, count, now};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{Reservation, Shortfall, Victims};

/// Number of attempts to make space for one object. Another request may take the space before it is used.
const TRIES: usize = 4;

impl Store {
    /// Checks that there is space for one more snapshot, before anything expensive is computed for it.
    ///
    /// # Errors
    /// A quota or the disk is full and nothing can be evicted, or the disk fails.
    pub async fn admit(&self, owner: Owner) -> Result<(), StoreError> {
        self.inner.check_reach()?;
        self.inner.index.ready().await?;
        self.inner.check_room(owner).await
    }
}

impl Inner {
    /// Refuses at once while the index or the object store is unreachable, before anything is computed.
    pub(super) fn check_reach(&self) -> Result<(), StoreError> {
        if self.index.is_shared()
            && let Some(failure) = self.index.failure()
        {
            return Err(failure);
        }
        self.objects.backend().check()
    }

    /// Reserves space for an object of `bytes`, evicting versions if necessary.
    pub(super) async fn admit(self: &Arc<Self>, owner: Owner, bytes: u64) -> Result<Reservation, StoreError> {
        let reserve = || self.index.capacity().reserve(owner, bytes, self.limits());
        let mut shortfall = match reserve() {
            Ok(reservation) => return Ok(reservation),
            Err(shortfall) => shortfall,
        };
        let _guard = self.evicting.lock().await;
        for _ in 0..TRIES {
            match reserve() {
                Ok(reservation) => return Ok(reservation),
                Err(current) => shortfall = current,
            }
            if !self.evict_versions(owner, bytes, shortfall).await? {
                // Garbage may have been removed since `shortfall` was computed.
                match reserve() {
                    Ok(reservation) => return Ok(reservation),
                    Err(current) => shortfall = current,
                }
                break;
            }
        }
        count(&self.counters.refused, 1);
        Err(shortfall.refusal(self.limits()))
    }

    /// Refuses if the largest possible snapshot would not fit even after everything evictable is evicted.
    pub(super) async fn check_room(&self, owner: Owner) -> Result<(), StoreError> {
        let bytes = self.codec.max_bytes() as u64;
        let Err(shortfall) = self.index.capacity().fits(owner, bytes, self.limits()) else {
            return Ok(());
        };
        let (victims, missing) = self.victims(owner, bytes, shortfall);
        let possible = self.index.can_evict(victims, missing).await?;
        let removable = self.index.can_sweep(now(), self.exempt()).await?;
        if possible || removable || self.index.capacity().fits(owner, bytes, self.limits()).is_ok() {
            return Ok(());
        }
        count(&self.counters.refused, 1);
        Err(shortfall.refusal(self.limits()))
    }

    /// Frees the missing space, so that `needed` bytes of `owner`, which are not reserved yet, fit. If that is
    /// impossible, evicts nothing and returns false.
    pub(super) async fn evict_versions(
        self: &Arc<Self>,
        owner: Owner,
        needed: u64,
        shortfall: Shortfall,
    ) -> Result<bool, StoreError> {
        // For an owner over its own budget, its own versions are evicted. Expired items, unused texts and garbage of
        // all owners are removed by the leader anyway, and the request must not wait for that here.
        let is_own = self.index.is_shared() && matches!(shortfall, Shortfall::Owner { .. });
        let swept =
            if is_own { 0 } else { self.index.expire(now(), self.exempt()).await? + self.index.prune_texts().await? };
        if swept == 0 {
            let (victims, missing) = self.victims(owner, needed, shortfall);
            let Some(evicted) = self.index.evict(victims, missing, self.options.lineage).await? else {
                return Ok(false);
            };
            count(&self.counters.dropped, evicted);
        }
        if !is_own {
            self.remove_garbage().await?;
        }
        Ok(true)
    }

    /// Returns the owners whose versions may be evicted, and the number of bytes to free.
    fn victims(&self, owner: Owner, needed: u64, shortfall: Shortfall) -> (Victims, u64) {
        match shortfall {
            Shortfall::Owner { missing, .. } => (Victims::only(owner), missing),
            // Garbage counts as used space, and is removed first.
            Shortfall::Disk { missing } => {
                let missing = missing.saturating_sub(self.index.capacity().totals(|totals| totals.garbage));
                (self.index.capacity().victims(owner, needed, missing), missing)
            }
        }
    }
}
