//! Removals in the model: expired items, texts that nothing needs, and evicted versions.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::model::{Kept, Model};
use crate::session::id::{Owner, SessionId};
use crate::session::index::*;

impl Model {
    /// Removes what has expired, and returns the number of removed items.
    pub(super) fn expire(&mut self, now: u64, exempt: &BTreeSet<SessionId>) -> usize {
        let count = |model: &Self| model.sessions.len() + model.responses.len() + model.receipts.len();
        let before = count(self);
        self.change(|model| {
            let lasts = |ends: u64| ends > now;
            model.sessions.retain(|(id, kept)| kept.row.ends(0).is_none_or(lasts) || exempt.contains(id));
            model.responses.retain(|_, row| lasts(row.ends));
            model.receipts.retain(|_, (ends, _)| lasts(*ends));
        });
        before - count(self)
    }

    /// Returns the texts that a listed version, or the text of one, needs.
    pub(super) fn needed_texts(&self) -> BTreeSet<String> {
        let mut needed = BTreeSet::new();
        for version in self.versions.keys() {
            needed.extend(self.text(version).into_iter().map(|(id, _)| id));
        }
        needed
    }

    pub(super) fn prune_texts(&mut self) -> usize {
        let (before, needed) = (self.texts.len(), self.needed_texts());
        self.texts.retain(|id, _| needed.contains(id));
        before - self.texts.len()
    }

    /// Returns the rows of a version's text.
    pub(super) fn text(&self, version: &str) -> Vec<(String, Vec<u8>)> {
        let (mut rows, mut next) = (Vec::new(), Some(version.to_owned()));
        while let Some(id) = next.take()
            && let Some(row) = self.texts.get(&id)
        {
            next = TextRow::parse(row).expect("a row").parent.map(str::to_owned);
            rows.push((id, row.clone()));
        }
        rows
    }

    /// Returns the owners with evictable versions that take space, and the owners with any evictable versions.
    pub(super) fn evictable_owners(&self) -> [HashSet<Owner>; 2] {
        [1, 0].map(|least| {
            let takes_space = |version: &str| self.versions[version].bytes >= least;
            let of_session = |kept: &Kept| {
                let mut old = kept.list.iter().filter(|(version, kept_here)| *kept_here && *version != kept.row.head);
                old.any(|(version, _)| takes_space(version))
            };
            let sessions = self.sessions.iter().map(|(_, kept)| kept).filter(|kept| of_session(kept));
            let responses = self.responses.values().filter(|row| takes_space(&row.version));
            sessions.map(|kept| kept.row.owner).chain(responses.map(|row| row.owner)).collect()
        })
    }

    /// Evicts versions of one owner.
    pub(super) fn evict(&mut self, owner: Owner, missing: u64, lineage: usize) -> Option<usize> {
        let chosen = self.evictable(owner, missing)?;
        self.change(|model| {
            for (holder, version) in &chosen {
                if model.responses.remove(holder).is_none() {
                    let id = SessionId::parse(holder).expect("a session");
                    let kept = model.session_mut(&id);
                    let at = kept.list.iter().position(|(id, _)| id == version).expect("it lists the version");
                    kept.release(at, lineage);
                }
            }
        });
        Some(chosen.len())
    }

    /// Returns the sessions and responses that must each release a version, so that `missing` bytes are free: untagged
    /// versions of the least recently used sessions first, then responses, then tagged versions.
    pub(super) fn evictable(&self, owner: Owner, missing: u64) -> Option<Vec<(String, String)>> {
        let mut order = Vec::new();
        for (id, kept) in self.sessions.iter().filter(|(_, kept)| kept.row.owner == owner) {
            let tagged = kept.row.tagged_versions();
            for (at, (version, _)) in kept.list.iter().enumerate().filter(|(_, (_, kept))| *kept) {
                if *version != kept.row.head {
                    let class = if tagged.contains(version.as_str()) { 2 } else { 0 };
                    order.push(((class, kept.row.used, id.to_string(), at), version.clone()));
                }
            }
        }
        for (id, row) in self.responses.iter().filter(|(_, row)| row.owner == owner) {
            order.push(((1, row.ends, id.clone(), 0), row.version.clone()));
        }
        order.sort();
        let (mut freed, mut chosen) = (0, Vec::new());
        let mut released: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for ((_, _, holder, _), version) in order {
            if freed >= missing {
                break;
            }
            let holders = released.entry(version.clone()).or_default();
            holders.push(holder);
            let of_responses = self.responses.values().filter(|row| row.version == version).count();
            let bytes = self.versions[&version].bytes;
            if bytes > 0 && holders.len() == self.keepers(&version).len() + of_responses {
                freed += bytes;
                chosen.extend(holders.iter().map(|holder| (holder.clone(), version.clone())));
            }
        }
        (freed >= missing).then_some(chosen)
    }
}
