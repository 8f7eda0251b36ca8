//! Evicting versions to make space: first old versions of the least recently used sessions, then stored responses, oldest
//! first. A session's head is never evicted.

use std::collections::HashMap;

use redb::ReadableTable;

use super::error::IndexError;
use super::rows::{ResponseRow, SessionRow};
use super::tables::{Access, Tables, damaged_row};
use super::transaction::Write;
use crate::session::id::{Owner, ResponseId};

/// Added to the expiry of responses, so that they rank after all sessions.
const RESPONSES: u64 = 1 << 63;

/// Sorts after every name.
const LAST: &str = "\u{10ffff}";

/// Something that keeps a version: a session's name and the position in its list, or a response's name and 0.
pub(crate) type Holder = (String, u64);

/// The search for versions to evict.
#[derive(Default)]
struct Search {
    candidates: HashMap<String, Candidate>,
    chosen: Vec<Holder>,
    freed: u64,
}

/// A version at least one of whose holders may release it.
struct Candidate {
    other_holders: u64,
    bytes: u64,
    holders: Vec<Holder>,
}

impl<A: Access> Tables<A> {
    /// The holders that must release their versions to free at least `missing` bytes; `None` if that is impossible.
    pub(crate) fn droppable(&self, of: Option<Owner>, missing: u64) -> Result<Option<Vec<Holder>>, IndexError> {
        let mut search = Search::default();
        if missing == 0 {
            return Ok(Some(search.chosen));
        }
        if let Some(of) = of {
            for entry in self.droppable_by.range((&of.0, 0, "")..=(&of.0, u64::MAX, LAST))? {
                if self.search(entry?.0.value().2, &mut search, missing)? {
                    return Ok(Some(search.chosen));
                }
            }
        } else {
            for entry in self.droppable.iter()? {
                if self.search(entry?.0.value().1, &mut search, missing)? {
                    return Ok(Some(search.chosen));
                }
            }
        }
        Ok(None)
    }

    /// Adds what a session or response can release; true once that is enough.
    fn search(&self, name: &str, search: &mut Search, missing: u64) -> Result<bool, IndexError> {
        if ResponseId::parse(name).is_some() {
            let version = self.responses.get(name)?.map(|row| row.value().1.to_owned());
            let version =
                version.ok_or_else(|| damaged_row(format!("{name} is listed for eviction and has no row")))?;
            return self.release(search, &version, (name.to_owned(), 0), missing);
        }
        let head = self.session(name)?.map(|row| row.head);
        for entry in self.kept.range((name, 0)..=(name, u64::MAX))? {
            let (key, version) = entry?;
            let version = version.value();
            if head.as_deref() != Some(version)
                && self.release(search, version, (name.to_owned(), key.value().1), missing)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn release(&self, search: &mut Search, version: &str, holder: Holder, missing: u64) -> Result<bool, IndexError> {
        if !search.candidates.contains_key(version) {
            let row = self.require_version(version)?;
            let new = Candidate { other_holders: row.kept_by, bytes: row.bytes, holders: Vec::new() };
            search.candidates.insert(version.to_owned(), new);
        }
        let Some(found) = search.candidates.get_mut(version) else { return Ok(false) };
        found.other_holders = found.other_holders.saturating_sub(1);
        found.holders.push(holder);
        // A version's bytes are free only once all of its holders have released it.
        if found.other_holders == 0 && found.bytes > 0 {
            search.freed += found.bytes;
            search.chosen.append(&mut found.holders);
        }
        Ok(search.freed >= missing)
    }
}

impl Write<'_> {
    pub(super) fn add_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), IndexError> {
        self.tables.droppable.insert((used, name), &owner.0)?;
        self.tables.droppable_by.insert((&owner.0, used, name), ())?;
        Ok(())
    }

    pub(super) fn remove_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), IndexError> {
        self.tables.droppable.remove((used, name))?;
        self.tables.droppable_by.remove((&owner.0, used, name))?;
        Ok(())
    }

    /// Fills the eviction order for an index written by an earlier version.
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
            self.drop_version(name, &mut row, *position, lineage)?;
            self.put_session(name, Some(&old), &row)?;
        }
        Ok(())
    }

    /// A response of any owner.
    pub(super) fn any_response(&self, name: &str) -> Result<ResponseRow, IndexError> {
        let owner = self.tables.responses.get(name)?.map(|row| Owner(*row.value().0));
        let owner = owner.ok_or_else(|| damaged_row(format!("response {name} has no row")))?;
        self.tables.response(owner, name)
    }
}

/// The eviction rank of a response.
pub(super) fn response_rank(ends: u64) -> u64 {
    RESPONSES | ends
}
