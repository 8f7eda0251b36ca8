//! Evicts versions to free space. The owner that uses the most space loses first, as long as it uses more than its
//! share: first old versions of its least recently used sessions, then its stored responses, oldest first, and then the
//! tagged versions of its sessions. A session's head is never evicted.

use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use redb::{Range, ReadableTable};

use super::error::IndexError;
use super::tables::{Access, Tables, damaged_row};
use super::transaction::Write;
use crate::session::id::{Owner, ResponseId};
use crate::session::index::branches::drop_version;
use crate::session::index::{ResponseRow, SessionRow, Transaction, Victims};

/// Added to the expiry of a response, so that responses rank after all sessions.
const RESPONSES: u64 = 1 << 63;

/// Added to a session's last use for its tagged versions, so that these rank after everything else.
const TAGGED: u64 = 3 << 62;

/// Sorts after every name.
const LAST: &str = "\u{10ffff}";

/// Something that keeps a version: a session's name and the position in its list, or a response's name and 0.
pub(crate) type Holder = (String, u64);

/// The result of a search for versions to evict.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The holders that must release their versions; `None` if releasing all of them would not free enough.
    pub(crate) holders: Option<Vec<Holder>>,
    /// Number of index rows that the search has read.
    pub(crate) rows: u64,
}

/// The state of a search for versions to evict.
#[derive(Default)]
struct Search<'t> {
    /// For each owner, the holders not visited yet.
    owners: HashMap<Owner, Holders<'t>>,
    candidates: HashMap<String, Candidate>,
    chosen: Vec<Holder>,
    rows: u64,
}

/// The holders of an owner's versions, in eviction order.
struct Holders<'t> {
    /// The owner's sessions and responses.
    order: Range<'t, (&'static [u8; 16], u64, &'static str), ()>,
    /// What the current session or response may still release: its holders and their versions.
    next: VecDeque<(Holder, String)>,
}

/// A version that at least one of its holders may release.
struct Candidate {
    other_holders: u64,
    bytes: u64,
    holders: Vec<Holder>,
}

impl<A: Access> Tables<A> {
    /// Finds the holders that must release their versions to free at least `missing` bytes. Visits the owners that may
    /// lose something, starting with the one that uses the most space, and reads no more rows than it needs.
    pub(crate) fn droppable(&self, victims: &Victims, missing: u64) -> Result<Plan, IndexError> {
        let mut search = Search::default();
        let mut largest = BinaryHeap::from([victims.writer]);
        let mut other = victims.next(None);
        // An owner whose usage shrinks meanwhile comes up again, and must not lose twice.
        let mut seen = HashSet::new();
        let mut freed = 0;
        while freed < missing {
            // Other owners are looked up only when they become the largest.
            while let Some(next) = other.filter(|next| largest.peek() < Some(next)) {
                if seen.insert(next.1) {
                    largest.push(next);
                }
                other = victims.next(other);
            }
            let Some((used, owner)) = largest.pop() else {
                return Ok(Plan { holders: None, rows: search.rows });
            };
            if victims.may_lose((used, owner))
                && let Some(bytes) = self.release_next(owner, &mut search)?
            {
                freed += bytes;
                largest.push((used.saturating_sub(bytes), owner));
            }
        }
        Ok(Plan { holders: Some(search.chosen), rows: search.rows })
    }

    /// Lets an owner's next holder release its version, and returns the bytes that this frees; `None` if no holder is
    /// left.
    fn release_next<'t>(&'t self, owner: Owner, search: &mut Search<'t>) -> Result<Option<u64>, IndexError> {
        while let Some((holder, version)) = self.next_holder(owner, search)? {
            match self.release(search, holder, &version) {
                Err(IndexError::Row(reason)) => {
                    tracing::error!(version, reason, "a damaged row: the version cannot be evicted");
                }
                freed => return freed.map(Some),
            }
        }
        Ok(None)
    }

    fn next_holder<'t>(
        &'t self,
        owner: Owner,
        search: &mut Search<'t>,
    ) -> Result<Option<(Holder, String)>, IndexError> {
        let holders = match search.owners.entry(owner) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(new) => {
                let order = self.droppable_by.range((&owner.0, 0, "")..=(&owner.0, u64::MAX, LAST))?;
                new.insert(Holders { order, next: VecDeque::new() })
            }
        };
        while holders.next.is_empty()
            && let Some(entry) = holders.order.next()
        {
            let key = entry?.0;
            let (_, rank, name) = key.value();
            search.rows += 1;
            match self.releasable(name, rank >= TAGGED, &mut search.rows) {
                Ok(found) => holders.next = found,
                Err(IndexError::Row(reason)) => {
                    tracing::error!(name, reason, "a damaged row: nothing of it can be evicted");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(holders.next.pop_front())
    }

    /// Returns what a session or response may release: its holders and their versions, oldest first. Of a session,
    /// these are either the `tagged` versions or the others.
    fn releasable(&self, name: &str, tagged: bool, rows: &mut u64) -> Result<VecDeque<(Holder, String)>, IndexError> {
        *rows += 1;
        if ResponseId::parse(name).is_some() {
            let version = self.responses.get(name)?.map(|row| row.value().1.to_owned());
            let version =
                version.ok_or_else(|| damaged_row(format!("{name} is listed for eviction and has no row")))?;
            return Ok([((name.to_owned(), 0), version)].into());
        }
        let Some(row) = self.session(name)? else { return Ok(VecDeque::new()) };
        let (mut found, with_tags) = (VecDeque::new(), row.tagged_versions());
        for entry in self.kept.range((name, 0)..=(name, u64::MAX))? {
            let (key, version) = entry?;
            *rows += 1;
            if row.head != version.value() && with_tags.contains(version.value()) == tagged {
                found.push_back(((name.to_owned(), key.value().1), version.value().to_owned()));
            }
        }
        Ok(found)
    }

    fn release(&self, search: &mut Search<'_>, holder: Holder, version: &str) -> Result<u64, IndexError> {
        if !search.candidates.contains_key(version) {
            search.rows += 1;
            let row = self.require_version(version)?;
            let new = Candidate { other_holders: row.kept_by, bytes: row.bytes, holders: Vec::new() };
            search.candidates.insert(version.to_owned(), new);
        }
        let Some(found) = search.candidates.get_mut(version) else { return Ok(0) };
        found.other_holders = found.other_holders.saturating_sub(1);
        found.holders.push(holder);
        // A version's bytes are freed only once all of its holders have released it.
        if found.other_holders > 0 || found.bytes == 0 {
            return Ok(0);
        }
        search.chosen.append(&mut found.holders);
        Ok(found.bytes)
    }

    /// Returns the owners that have anything in the eviction order.
    pub(super) fn evictable_owners(&self) -> Result<HashSet<Owner>, IndexError> {
        let (mut owners, mut from) = (HashSet::new(), [0; 16]);
        while let Some(entry) = self.droppable_by.range((&from, 0, "")..)?.next() {
            let owner = *entry?.0.value().0;
            owners.insert(Owner(owner));
            // Skip the other rows of this owner.
            let Some(next) = u128::from_be_bytes(owner).checked_add(1) else { break };
            from = next.to_be_bytes();
        }
        Ok(owners)
    }
}

impl Write<'_> {
    pub(super) fn add_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), IndexError> {
        self.tables.droppable_by.insert((&owner.0, used, name), ())?;
        self.change.evictable.insert(owner, true);
        Ok(())
    }

    pub(super) fn remove_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), IndexError> {
        self.tables.droppable_by.remove((&owner.0, used, name))?;
        let any = self.tables.droppable_by.range((&owner.0, 0, "")..=(&owner.0, u64::MAX, LAST))?.next().is_some();
        self.change.evictable.insert(owner, any);
        // An index written by an earlier version of the server has the entry in this table as well.
        if self.tables.droppable.get((used, name))?.is_some() {
            self.tables.droppable.remove((used, name))?;
        }
        Ok(())
    }

    /// Adds a session to the eviction order, for its untagged and its tagged versions.
    pub(super) fn add_session_droppable(&mut self, name: &str, row: &SessionRow) -> Result<(), IndexError> {
        let [untagged, tagged] = self.have_droppable(name, row)?;
        if untagged {
            self.add_droppable(row.owner, row.used, name)?;
        }
        if tagged {
            self.add_droppable(row.owner, TAGGED | row.used, name)?;
        }
        Ok(())
    }

    pub(super) fn remove_session_droppable(&mut self, name: &str, row: &SessionRow) -> Result<(), IndexError> {
        if row.kept > 1 {
            self.remove_droppable(row.owner, row.used, name)?;
        }
        if !row.tags.is_empty() {
            self.remove_droppable(row.owner, TAGGED | row.used, name)?;
        }
        Ok(())
    }

    /// Returns whether a session keeps, besides its head, an untagged version that takes space, and a tagged one.
    fn have_droppable(&self, name: &str, row: &SessionRow) -> Result<[bool; 2], IndexError> {
        if row.tags.is_empty() && row.kept != 2 {
            return Ok([row.kept > 2, false]);
        }
        let (mut counts, mut have, tagged) = ([0; 2], [false; 2], row.tagged_versions());
        for entry in self.tables.kept.range((name, 0)..=(name, u64::MAX))? {
            let version = entry?.1;
            let class = usize::from(tagged.contains(version.value()));
            if version.value() == row.head {
                continue;
            }
            counts[class] += 1;
            // Few versions are empty, so only the first of each class is looked up.
            have[class] = counts[class] > 1 || self.takes_space(version.value())?;
        }
        Ok(have)
    }

    fn takes_space(&self, version: &str) -> Result<bool, IndexError> {
        match self.tables.version(version) {
            Ok(found) => Ok(found.is_some_and(|version| version.bytes > 0)),
            // The eviction logs the damaged row.
            Err(IndexError::Row(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Fills the eviction order of an index written by an earlier version of the server.
    pub(super) fn rebuild_droppable(&mut self) -> Result<(), IndexError> {
        let mut found: Vec<(Owner, u64, String)> = Vec::new();
        for entry in self.tables.droppable.iter()? {
            let (key, owner) = entry?;
            found.push((Owner(*owner.value()), key.value().0, key.value().1.to_owned()));
        }
        for entry in self.tables.responses.iter()? {
            let (name, row) = entry?;
            let (owner, _, ends, _) = row.value();
            found.push((Owner(*owner), response_rank(ends), name.value().to_owned()));
        }
        found.iter().try_for_each(|(owner, used, name)| self.add_droppable(*owner, *used, name))
    }

    /// Makes the holders found by [`Tables::droppable`] release their versions.
    pub(crate) fn evict(&mut self, holders: &[Holder], lineage: usize) -> Result<(), IndexError> {
        for (name, position) in holders {
            if ResponseId::parse(name).is_some() {
                let row = self.any_response(name)?;
                self.remove_response(name, &row)?;
                continue;
            }
            let old: SessionRow =
                self.tables.session(name)?.ok_or_else(|| damaged_row(format!("session {name} has no row")))?;
            let mut row = old.clone();
            drop_version(self, name, &mut row, *position, lineage)?;
            self.put_session(name, Some(&old), Some(&row))?;
        }
        Ok(())
    }

    /// Returns a response, whoever owns it.
    pub(super) fn any_response(&self, name: &str) -> Result<ResponseRow, IndexError> {
        let owner = self.tables.responses.get(name)?.map(|row| Owner(*row.value().0));
        let owner = owner.ok_or_else(|| damaged_row(format!("response {name} has no row")))?;
        self.tables.response(owner, name)
    }
}

/// Returns the eviction rank of a response.
pub(super) fn response_rank(ends: u64) -> u64 {
    RESPONSES | ends
}

#[cfg(test)]
mod tests;
