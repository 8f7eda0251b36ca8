//! The background tasks that remove expired items, garbage, and leftovers of a crash, and that flush the store.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::inner::{Inner, count, now};
use super::types::Durability;
use crate::session::blocking::blocking;
use crate::session::error::StoreError;
use crate::session::id::{SessionId, VersionId};
use crate::session::objects::Batch;

/// Number of items removed, or objects checked, in one step.
const BATCH: usize = 500;

/// Flush interval of a store that does not sync each turn.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// Starts the tasks; they stop when the store is dropped.
pub(super) fn start(inner: &Arc<Inner>) {
    let (weak, garbage) = (Arc::downgrade(inner), Arc::clone(&inner.garbage));
    let every = inner.options.sweep_every;
    if inner.options.durability == Durability::Memory {
        tokio::spawn(flush_regularly(weak.clone(), FLUSH_EVERY.min(every)));
    }
    tokio::spawn(async move {
        let (mut swept, mut opened) = (Instant::now(), 0);
        let mut listing: Option<JoinHandle<()>> = None;
        loop {
            let Some(inner) = weak.upgrade() else { return };
            // After the index is opened or reopened, it may lack some of what was written.
            if std::mem::replace(&mut opened, inner.index.opened()) != inner.index.opened() {
                inner.orphans.store(true, Ordering::SeqCst);
            }
            if listing.as_ref().is_none_or(JoinHandle::is_finished) && inner.orphans.swap(false, Ordering::SeqCst) {
                listing = Some(tokio::spawn(sweep_orphans(weak.clone())));
            }
            log_failure(inner.remove_suspects().await);
            if swept.elapsed() >= every {
                log_failure(inner.index.ready().await);
                if inner.index.failure().is_some() {
                    // Checks whether the store can commit again.
                    log_failure(inner.index.flush().await);
                }
                log_failure(inner.save_last_uses().await);
                log_failure(inner.index.expire(now(), inner.exempt()).await.map(drop));
                swept = Instant::now();
            }
            log_failure(inner.index.prune_texts().await.map(drop));
            log_failure(inner.remove_garbage().await);
            drop(inner);
            tokio::select! {
                () = garbage.notified() => {}
                () = sleep_until(swept + every) => {}
            }
        }
    });
}

/// Flushes the store. In a task of its own, because sweeps may wait for a slow object store.
async fn flush_regularly(store: Weak<Inner>, every: Duration) {
    let mut on_disk = 0;
    loop {
        sleep(every).await;
        let Some(inner) = store.upgrade() else { return };
        // An idle store does not touch the disk.
        let before = inner.index.transactions();
        if before != on_disk {
            let flushed = inner.flush().await;
            if flushed.is_ok() {
                // Transactions committed during the flush count as not yet flushed. The flush itself is one
                // transaction.
                on_disk = before + 1;
            }
            log_failure(flushed);
        }
    }
}

/// Logs a failure of the sweep. The next sweep tries again.
pub(super) fn log_failure(result: Result<(), StoreError>) {
    if let Err(error) = result {
        tracing::warn!(%error, "the sweep of the store failed; the next one tries again");
    }
}

impl Inner {
    /// Syncs everything to disk: first the objects, off the index's thread.
    pub(super) async fn flush(&self) -> Result<(), StoreError> {
        let objects = self.objects.clone();
        blocking(move || objects.sync()).await?;
        self.index.flush().await
    }

    /// Writes the last uses recorded in memory to the index.
    pub(super) async fn save_last_uses(&self) -> Result<(), StoreError> {
        let mut uses: HashMap<SessionId, u64> = self.last_uses.lock().clone();
        if self.index.is_shared() {
            // Other servers do not know that these sessions are in use.
            uses.extend(self.leases.all_in_use().into_iter().map(|id| (id, now())));
        }
        if uses.is_empty() {
            return Ok(());
        }
        self.index.ready().await?;
        self.index.record_uses(uses.clone()).await?;
        // Uses recorded since the copy are written next time.
        self.last_uses.lock().retain(|id, used| uses.get(id) != Some(used));
        Ok(())
    }

    /// Removes garbage: objects that nothing points to any more.
    pub(super) async fn remove_garbage(&self) -> Result<(), StoreError> {
        while self.remove_some_garbage().await? {}
        Ok(())
    }

    /// Like [`Self::remove_garbage`], but stops as soon as this server is not the leader.
    pub(super) async fn remove_garbage_if_leading(&self) -> Result<(), StoreError> {
        while self.index.leads().await? && self.remove_some_garbage().await? {}
        Ok(())
    }

    /// Removes one batch of garbage; returns whether there may be more that can be removed.
    async fn remove_some_garbage(&self) -> Result<bool, StoreError> {
        {
            let _removing = self.removing.read().await;
            let batch = self.index.garbage(BATCH).await?;
            if batch.is_empty() {
                return Ok(false);
            }
            if self.options.durability == Durability::Memory {
                // If the index reverts to its state on disk, the objects that it then names must still exist.
                self.index.flush().await?;
            }
            let found = batch.len();
            let gone = self.objects.delete(batch).await;
            let all = gone.len() == found;
            count(&self.counters.collected, gone.len());
            self.index.forget_garbage(gone).await?;
            Ok(all)
        }
    }

    /// Marks an object as a possible orphan.
    pub(super) fn suspect(&self, id: &VersionId) {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
        self.garbage.notify_one();
    }

    /// Removes possible orphans that nothing points to. Objects that are still being uploaded are checked later. All
    /// are checked later while the index may still need an object that it does not name: a commit that failed here may
    /// yet take effect in a database, and a damaged index kept beside the current one may name objects that the current
    /// one does not.
    pub(super) async fn remove_suspects(&self) -> Result<(), StoreError> {
        if !self.index.names_all() {
            return Ok(());
        }
        let suspects = || self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        let checked: HashSet<VersionId> =
            suspects().iter().filter(|id| !self.objects.is_uploading(id)).cloned().collect();
        if checked.is_empty() {
            return Ok(());
        }
        let _removing = self.removing.read().await;
        let orphans: HashSet<VersionId> =
            self.index.orphans(checked.iter().cloned().collect()).await?.into_iter().collect();
        let gone: HashSet<VersionId> =
            self.objects.delete(orphans.iter().cloned().collect()).await.into_iter().collect();
        suspects().retain(|id| !checked.contains(id) || (orphans.contains(id) && !gone.contains(id)));
        Ok(())
    }

    /// Removes the objects of a batch that nothing points to; returns how many. The batch has the time at which each
    /// was written.
    async fn remove_orphans(&self, mut batch: Batch) -> Result<usize, StoreError> {
        if self.index.is_shared() {
            // Another server may be about to add a younger object to the index.
            let grace = self.options.orphan_grace.as_millis() as u64;
            batch.retain(|(_, written)| written.saturating_add(grace) <= now());
        }
        self.remove_orphans_of(batch.into_iter().map(|(id, _)| id).collect()).await
    }

    async fn remove_orphans_of(&self, mut ids: Vec<VersionId>) -> Result<usize, StoreError> {
        // Check uploads before the index: an upload that finishes in between is in the index by then, if ever.
        ids.retain(|id| !self.objects.is_uploading(id));
        let _removing = self.removing.read().await;
        let orphans = self.index.orphans(ids).await?;
        Ok(self.objects.delete(orphans).await.len())
    }
}

/// Removes what a crashed process left behind: partly written files, and objects that were not yet in the index. This
/// runs as its own task because there may be many. It holds the store for one batch at a time.
pub(super) async fn sweep_orphans(store: Weak<Inner>) {
    if let Err(error) = try_sweep(&store).await
        && let Some(inner) = store.upgrade()
    {
        inner.orphans.store(true, Ordering::SeqCst);
        log_failure(Err(error));
    }
}

async fn try_sweep(store: &Weak<Inner>) -> Result<(), StoreError> {
    let Some(objects) = store.upgrade().map(|inner| inner.objects.clone()) else { return Ok(()) };
    let mut batches = objects.batches(BATCH);
    let cleaned = objects.clone();
    let temporaries = blocking(move || {
        cleaned
            .remove_temporaries()
            .map_err(|error| StoreError::from_io("cleaning the folder of the objects failed", &error))
    });
    let temporaries = temporaries.await?;
    let (mut orphans, mut seen) = (0, HashSet::new());
    let most = store.upgrade().filter(|inner| inner.index.is_shared()).map_or(usize::MAX, |_| MOST_SEEN);
    while let Some(batch) = objects.next(&mut batches).await? {
        let Some(inner) = store.upgrade() else { return Ok(()) };
        if !inner.index.leads().await? {
            return Ok(());
        }
        seen.extend(batch.iter().map(|(id, _)| id.as_str().to_owned()).take(most - seen.len()));
        if inner.index.names_all() {
            orphans += inner.remove_orphans(batch).await?;
        }
    }
    if temporaries + orphans > 0 {
        tracing::info!(temporaries, orphans, "removed objects that an earlier process left behind");
    }
    let Some(inner) = store.upgrade() else { return Ok(()) };
    if seen.len() >= most {
        tracing::info!("there are {most} snapshots or more: the server does not look for missing ones");
        return Ok(());
    }
    inner.report_missing(seen).await
}

/// Maximum number of snapshot names collected to find missing snapshots when servers share the index.
const MOST_SEEN: usize = 1_000_000;

/// Maximum number of missing snapshots that the log names one by one.
const NAMED: usize = 100;

impl Inner {
    /// Logs the snapshots that the index names but that do not exist. `seen` has the names found by the listing; since
    /// then, some objects may have been removed and others added.
    async fn report_missing(&self, seen: HashSet<String>) -> Result<(), StoreError> {
        let missing = self.index.missing(seen).await?;
        let mut found = 0;
        for (version, (row, sessions)) in missing {
            let Some(id) = VersionId::parse(&version) else { continue };
            // The object may have been written, or the version released, in the meantime.
            let row = self.index.version(row.owner, &id).await?;
            let Some(row) = row.filter(|row| row.kept_by > 0) else { continue };
            if matches!(self.objects.get(&id, row.bytes).await, Ok(Some(_))) {
                continue;
            }
            found += 1;
            if found <= NAMED {
                tracing::error!(version = %id, ?sessions, "the snapshot of a version is missing");
            }
        }
        if found > 0 {
            tracing::error!(
                "{found} snapshots are missing: was the folder copied while a server used it? `tidegate sessions check` \
                 lists them all"
            );
        }
        Ok(())
    }
}
