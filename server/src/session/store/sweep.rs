//! What is done in the background: removing what has ended, what nothing points to, and what a crash left behind.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use futures_util::StreamExt as _;
use redb::ReadableTable;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::{Durability, Inner, Uses, count, now};
use crate::session::lease::Leases;
use crate::session::{SessionId, StoreError, VersionId};

/// Things removed, or objects looked at, in one step.
const LOT: usize = 500;

/// How often a store that does not sync its turns is flushed.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// Starts the task, which ends with the store.
pub(super) fn start(inner: &Arc<Inner>) {
    let (weak, garbage) = (Arc::downgrade(inner), Arc::clone(&inner.garbage));
    let every = inner.options.sweep_every;
    let flush = (inner.options.durability == Durability::Memory).then_some(FLUSH_EVERY.min(every));
    tokio::spawn(async move {
        let mut swept = Instant::now();
        let mut flushed = swept;
        let (mut opened, mut on_disk) = (0, 0);
        let mut listing: Option<JoinHandle<()>> = None;
        loop {
            let Some(inner) = weak.upgrade() else { return };
            // Opened now for the first time, or again after a failure: it may know less than was written.
            if std::mem::replace(&mut opened, inner.index.opened()) != inner.index.opened() {
                inner.orphans.store(true, Ordering::SeqCst);
            }
            if listing.as_ref().is_none_or(JoinHandle::is_finished) && inner.orphans.swap(false, Ordering::SeqCst) {
                listing = Some(tokio::spawn(sweep_orphans(weak.clone())));
            }
            tell(inner.remove_suspects().await);
            if swept.elapsed() >= every {
                tell(inner.ballast().await);
                tell(inner.note_uses().await);
                tell(inner.remove_ended().await.map(drop));
                swept = Instant::now();
            }
            tell(inner.collect().await);
            if flush.is_some_and(|flush| flushed.elapsed() >= flush) {
                // A store that rests leaves the disk alone.
                let before = inner.writer.transactions();
                if before != on_disk {
                    let flushed = inner.flush().await;
                    if flushed.is_ok() {
                        // What was committed while it ran counts as not flushed.
                        on_disk = before + 1;
                    }
                    tell(flushed);
                }
                flushed = Instant::now();
            }
            drop(inner);
            let next = flush.map_or(swept + every, |flush| (swept + every).min(flushed + flush));
            tokio::select! {
                () = garbage.notified() => {}
                () = sleep_until(next) => {}
            }
        }
    });
}

/// What fails is tried again the next time.
fn tell(end: Result<(), StoreError>) {
    if let Err(error) = end {
        tracing::warn!(%error, "the sweep of the store could not end its work");
    }
}

/// Says which sessions stay although their row says that they have ended.
#[derive(Clone)]
struct Stays {
    leases: Leases,
    uses: Uses,
}

impl Inner {
    /// What the index is asked with: whether a thing stays although it has ended by its row, being in use or lately used.
    pub(super) fn stays(&self) -> impl Fn(&str) -> bool + Clone + Send + 'static {
        let stays = Stays { leases: self.leases.clone(), uses: self.uses.clone() };
        move |name| SessionId::parse(name).is_some_and(|id| stays.leases.held(&id) || stays.uses.of(&id) > 0)
    }

    /// Puts on disk what is not there yet: the objects first, away from the thread of the index.
    pub(super) async fn flush(&self) -> Result<(), StoreError> {
        let blobs = self.blobs.clone();
        super::blocking(move || blobs.settle()).await?;
        // On a full disk too: an index that could not be written goes back to what is on disk.
        self.free(|_| Ok(())).await
    }

    /// Writes down the last uses that only memory knows.
    pub(super) async fn note_uses(&self) -> Result<(), StoreError> {
        let taken: HashMap<SessionId, u64> = self.uses.lock().clone();
        if taken.is_empty() {
            return Ok(());
        }
        self.ballast().await?;
        let noted = taken.clone();
        self.writer
            .run(move |write| {
                for (id, used) in &noted {
                    if let Some(old) = write.tables.session(id.as_str())? {
                        let mut row = old.clone();
                        row.used = row.used.max(*used);
                        write.put_session(id.as_str(), Some(&old), &row)?;
                    }
                }
                Ok(())
            })
            .await?;
        // Uses since then stay for the next time.
        self.uses.lock().retain(|id, used| taken.get(id) != Some(used));
        Ok(())
    }

    /// Removes the sessions, responses and receipts whose time is over; says how many there were.
    pub(super) async fn remove_ended(&self) -> Result<usize, StoreError> {
        let mut removed = 0;
        loop {
            if !self.any_ended().await? {
                return Ok(removed);
            }
            let stays = self.stays();
            removed += self.free(move |write| write.end(now(), LOT, &stays)).await?;
        }
    }

    /// Removes the objects that nothing points to.
    pub(super) async fn collect(&self) -> Result<(), StoreError> {
        loop {
            let lot = self.read(|tables| {
                let names = tables.garbage.iter()?.take(LOT);
                names.map(|entry| Ok(entry?.0.value().to_owned())).collect::<Result<Vec<_>, _>>()
            });
            let lot: Vec<VersionId> = lot.await?.iter().filter_map(|id| VersionId::parse(id)).collect();
            if lot.is_empty() {
                return Ok(());
            }
            if self.options.durability == Durability::Memory {
                // An index that goes back to what is on disk must find the objects that it points to then.
                self.free(|_| Ok(())).await?;
            }
            let asked = lot.len();
            let gone = self.blobs.delete(lot).await;
            let all = gone.len() == asked;
            count(&self.counters.collected, gone.len());
            let names: Vec<String> = gone.iter().map(|id| id.as_str().to_owned()).collect();
            self.free(move |write| write.collected(&names)).await?;
            if !all {
                return Ok(());
            }
        }
    }

    /// An object that is to be removed if the index does not name it.
    pub(super) fn suspect(&self, id: &VersionId) {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone());
        self.garbage.notify_one();
    }

    /// Removes the objects that are suspected, where nothing points to them; those on their way are asked about later.
    async fn remove_suspects(&self) -> Result<(), StoreError> {
        let suspects = || self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        let asked: Vec<VersionId> = suspects().iter().filter(|id| !self.blobs.coming(id)).cloned().collect();
        if asked.is_empty() {
            return Ok(());
        }
        let named = self.unknown(asked.clone()).await?;
        let left = named.len();
        let gone = self.blobs.delete(named.clone()).await;
        let stay: HashSet<VersionId> = if gone.len() == left {
            HashSet::new()
        } else {
            named.into_iter().filter(|id| !gone.contains(id)).collect()
        };
        suspects().retain(|id| stay.contains(id) || !asked.contains(id));
        Ok(())
    }

    async fn remove_orphans(&self, mut names: Vec<VersionId>) -> Result<usize, StoreError> {
        // First this and then the index: what is on its way now may be in the index by then, what is no longer on its
        // way certainly is, if it ever will be.
        names.retain(|id| !self.blobs.coming(id));
        let unknown = self.unknown(names).await?;
        Ok(self.blobs.delete(unknown).await.len())
    }

    /// Those of the names that nothing points to and that are not garbage.
    async fn unknown(&self, names: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError> {
        self.read(move |tables| {
            let mut unknown = Vec::new();
            for id in &names {
                // Garbage goes by its own way, once that it is garbage is on disk.
                let garbage = tables.garbage.get(id.as_str())?.is_some();
                if !garbage && tables.version(id.as_str())?.is_none_or(|row| row.kept_by == 0) {
                    unknown.push(id.clone());
                }
            }
            Ok(unknown)
        })
        .await
    }
}

/// Removes what a process that died left: half-written files, and objects that it had not yet told the index of. In a
/// task of its own, since there may be many; the store is held for one lot at a time.
async fn sweep_orphans(store: Weak<Inner>) {
    if let Err(error) = try_sweep(&store).await
        && let Some(inner) = store.upgrade()
    {
        inner.orphans.store(true, Ordering::SeqCst);
        tell(Err(error));
    }
}

async fn try_sweep(store: &Weak<Inner>) -> Result<(), StoreError> {
    let Some(blobs) = store.upgrade().map(|inner| inner.blobs.clone()) else { return Ok(()) };
    let mut lots = blobs.lots(LOT);
    let temporaries = super::blocking(move || {
        blobs.remove_temporaries().map_err(|error| StoreError::from_io("the folder of the objects", &error))
    });
    let temporaries = temporaries.await?;
    let mut orphans = 0;
    while let Some(lot) = lots.next().await {
        let Some(inner) = store.upgrade() else { return Ok(()) };
        orphans += inner.remove_orphans(lot).await?;
    }
    if temporaries + orphans > 0 {
        tracing::info!(temporaries, orphans, "removed what an earlier process left behind");
    }
    Ok(())
}
