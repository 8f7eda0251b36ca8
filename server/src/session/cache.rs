//! An LRU cache of snapshots in memory, bounded in bytes. Everything in it is also stored elsewhere.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::id::VersionId;
use super::snapshot::Snapshot;

#[derive(Debug)]
pub(crate) struct Cache {
    budget: u64,
    lru: Mutex<Lru>,
}

#[derive(Debug, Default)]
struct Lru {
    entries: HashMap<VersionId, Entry>,
    /// Snapshots by time of last use on `clock`, oldest first.
    order: BTreeMap<u64, VersionId>,
    clock: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    snapshot: Arc<Snapshot>,
    bytes: u64,
    used: u64,
}

impl Cache {
    pub(crate) fn new(budget: u64) -> Self {
        Self { budget, lru: Mutex::default() }
    }

    pub(crate) fn get(&self, id: &VersionId) -> Option<Arc<Snapshot>> {
        let mut lru = self.lock();
        let lru = &mut *lru;
        let entry = lru.entries.get_mut(id)?;
        lru.clock += 1;
        lru.order.remove(&entry.used);
        lru.order.insert(lru.clock, id.clone());
        entry.used = lru.clock;
        Some(Arc::clone(&entry.snapshot))
    }

    pub(crate) fn insert(&self, id: &VersionId, snapshot: Arc<Snapshot>) {
        let bytes = snapshot.bytes() as u64;
        let mut lru = self.lock();
        lru.remove(id);
        if bytes > self.budget {
            return; // it would evict everything else and still not fit
        }
        while lru.bytes + bytes > self.budget {
            let Some((_, oldest)) = lru.order.pop_first() else { break };
            lru.remove(&oldest);
        }
        lru.clock += 1;
        let used = lru.clock;
        lru.order.insert(used, id.clone());
        lru.bytes += bytes;
        lru.entries.insert(id.clone(), Entry { snapshot, bytes, used });
    }

    pub(crate) fn remove(&self, id: &VersionId) {
        self.lock().remove(id);
    }

    /// Returns the number of cached snapshots and their bytes.
    pub(crate) fn size(&self) -> (u64, u64) {
        let lru = self.lock();
        (lru.entries.len() as u64, lru.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Lru> {
        self.lru.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lru {
    fn remove(&mut self, id: &VersionId) {
        if let Some(entry) = self.entries.remove(id) {
            self.order.remove(&entry.used);
            self.bytes -= entry.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(floats: usize) -> Arc<Snapshot> {
        Arc::new(Snapshot { state: vec![0.0; floats], read: 1, ..Snapshot::default() })
    }

    #[test]
    fn the_least_recently_used_snapshot_is_evicted() {
        let one = snapshot(100).bytes() as u64;
        let cache = Cache::new(2 * one);
        let ids = [VersionId::new(), VersionId::new(), VersionId::new()];
        cache.insert(&ids[0], snapshot(100));
        cache.insert(&ids[1], snapshot(100));
        assert!(cache.get(&ids[0]).is_some());
        cache.insert(&ids[2], snapshot(100));
        assert!(cache.get(&ids[1]).is_none());
        assert!(cache.get(&ids[0]).is_some() && cache.get(&ids[2]).is_some());
        assert_eq!(cache.size(), (2, 2 * one));
        cache.insert(&ids[2], snapshot(1000));
        assert_eq!(cache.size(), (1, one), "a snapshot over the budget is not kept, nor is the one it replaced");
        cache.remove(&ids[0]);
        assert_eq!(cache.size(), (0, 0));
    }
}
