//! Whether there is room, and making some: what was used longest ago is dropped first, and no session's head ever.

use std::sync::Arc;

use super::{Inner, Store, count, now};
use crate::session::index::{Reservation, Short};
use crate::session::{Owner, StoreError};

/// How often room is made for one object: another could take it away before it is used.
const TRIES: usize = 4;

impl Store {
    /// Refuses where there would be no room for one snapshot more: to be asked before anything dear is computed for it.
    ///
    /// # Errors
    /// A quota or the disk is full, and nothing may be dropped, or the disk fails.
    pub async fn admit(&self, owner: Owner) -> Result<(), StoreError> {
        self.inner.ballast().await?;
        self.inner.could_admit(owner).await
    }
}

impl Inner {
    /// Room for an object of `bytes`, dropping what may be dropped where there is none.
    pub(super) async fn admit(self: &Arc<Self>, owner: Owner, bytes: u64) -> Result<Reservation, StoreError> {
        let reserve = || self.index.ledger.reserve(owner, bytes, self.bounds());
        let mut short = match reserve() {
            Ok(reservation) => return Ok(reservation),
            Err(short) => short,
        };
        let _alone = self.making_room.lock().await;
        for _ in 0..TRIES {
            match reserve() {
                Ok(reservation) => return Ok(reservation),
                Err(now) => short = now,
            }
            if !self.make_room(owner, short).await? {
                // What was garbage then may have been removed before it was asked for.
                match reserve() {
                    Ok(reservation) => return Ok(reservation),
                    Err(now) => short = now,
                }
                break;
            }
        }
        count(&self.counters.refused, 1);
        Err(self.refusal(short))
    }

    /// Refuses where one snapshot more, as large as any can be, would find no room however much is dropped.
    pub(super) async fn could_admit(&self, owner: Owner) -> Result<(), StoreError> {
        let bytes = self.codec.most_bytes() as u64;
        let Err(short) = self.index.ledger.fits(owner, bytes, self.bounds()) else {
            return Ok(());
        };
        let (of, missing) = self.to_drop(owner, short);
        let possible = self.read(move |tables| Ok(tables.droppable(of, missing)?.is_some())).await?;
        if possible || self.any_ended().await? || self.index.ledger.fits(owner, bytes, self.bounds()).is_ok() {
            return Ok(());
        }
        count(&self.counters.refused, 1);
        Err(self.refusal(short))
    }

    pub(super) async fn any_ended(&self) -> Result<bool, StoreError> {
        let stays = self.stays();
        self.read(move |tables| tables.any_ended(now(), &stays)).await
    }

    /// Drops what the bound asks for; false where that cannot be, and then nothing is dropped.
    pub(super) async fn make_room(self: &Arc<Self>, owner: Owner, short: Short) -> Result<bool, StoreError> {
        if self.remove_ended().await? == 0 {
            let (of, missing) = self.to_drop(owner, short);
            let lineage = self.options.lineage;
            let dropped = self.free(move |write| {
                let Some(places) = write.tables.droppable(of, missing)? else { return Ok(None) };
                write.drop_holders(&places, lineage)?;
                Ok(Some(places.len()))
            });
            let Some(dropped) = dropped.await? else { return Ok(false) };
            count(&self.counters.dropped, dropped);
        }
        self.collect().await?;
        Ok(true)
    }

    /// Whose versions to drop, and how many bytes of them.
    fn to_drop(&self, owner: Owner, short: Short) -> (Option<Owner>, u64) {
        match short {
            Short::Owner { missing, .. } => (Some(owner), missing),
            // Garbage is in the sum and goes first.
            Short::Disk { missing } => (None, missing.saturating_sub(self.index.ledger.sums(|sums| sums.garbage))),
        }
    }

    fn refusal(&self, short: Short) -> StoreError {
        match short {
            Short::Owner { found, .. } => {
                StoreError::Quota { quota: "bytes of snapshots", bound: self.options.owner_bytes, found }
            }
            Short::Disk { missing } => {
                let bound = self.options.disk_bytes;
                StoreError::Full { reason: format!("snapshots may take {bound} bytes, {missing} are missing") }
            }
        }
    }
}
