//! Snapshots in memory, within a budget of bytes: what was used longest ago goes first. Only a copy of what is kept.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Snapshot, VersionId};

/// The snapshots used last.
#[derive(Debug)]
pub(crate) struct Cache {
    budget: u64,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    entries: HashMap<VersionId, Entry>,
    /// By the moment of last use, oldest first.
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
        Self { budget, held: Mutex::default() }
    }

    pub(crate) fn get(&self, id: &VersionId) -> Option<Arc<Snapshot>> {
        let mut held = self.lock();
        let held = &mut *held;
        let entry = held.entries.get_mut(id)?;
        held.clock += 1;
        held.order.remove(&entry.used);
        held.order.insert(held.clock, id.clone());
        entry.used = held.clock;
        Some(Arc::clone(&entry.snapshot))
    }

    pub(crate) fn insert(&self, id: &VersionId, snapshot: Arc<Snapshot>) {
        let bytes = snapshot.bytes() as u64;
        let mut held = self.lock();
        held.remove(id);
        if bytes > self.budget {
            return; // it would drive out everything else, and then itself
        }
        while held.bytes + bytes > self.budget {
            let Some((_, oldest)) = held.order.pop_first() else { break };
            held.remove(&oldest);
        }
        held.clock += 1;
        let used = held.clock;
        held.order.insert(used, id.clone());
        held.bytes += bytes;
        held.entries.insert(id.clone(), Entry { snapshot, bytes, used });
    }

    pub(crate) fn remove(&self, id: &VersionId) {
        self.lock().remove(id);
    }

    /// How many snapshots there are, and their bytes.
    pub(crate) fn size(&self) -> (u64, u64) {
        let held = self.lock();
        (held.entries.len() as u64, held.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
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
    fn what_was_used_longest_ago_goes_first() {
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
        assert_eq!(cache.size(), (1, one), "what is larger than the budget does not stay, nor does what it replaced");
        cache.remove(&ids[0]);
        assert_eq!(cache.size(), (0, 0));
    }
}
