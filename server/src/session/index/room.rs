//! Making room: what may be dropped, and in which order. First the old versions of sessions, those of the sessions unused
//! for longest first; then stored responses, the oldest first. No session's head ever.

use std::collections::HashMap;

use redb::ReadableTable;

use super::rows::{ResponseRow, SessionRow};
use super::tables::{Access, Tables, broken};
use super::{Fault, Write};
use crate::session::{Owner, ResponseId};

/// What responses add to their end for their place in the order: they come after all sessions.
const RESPONSES: u64 = 1 << 63;

/// No name comes after it.
const LAST: &str = "\u{10ffff}";

/// Something that keeps a version: a session at a place, or a response.
pub(crate) type Holder = (String, u64);

/// The versions that could go, while they are looked through.
#[derive(Default)]
struct Search {
    wanted: HashMap<String, Wanted>,
    chosen: Vec<Holder>,
    freed: u64,
}

/// A version, once one that keeps it could let go of it.
struct Wanted {
    others: u64,
    bytes: u64,
    holders: Vec<Holder>,
}

impl<A: Access> Tables<A> {
    /// Who is to let go of a version so that at least `missing` bytes come free; none where that cannot be.
    pub(crate) fn droppable(&self, of: Option<Owner>, missing: u64) -> Result<Option<Vec<Holder>>, Fault> {
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

    /// Adds what a session or a response could let go of; whether that is enough.
    fn search(&self, name: &str, search: &mut Search, missing: u64) -> Result<bool, Fault> {
        if ResponseId::parse(name).is_some() {
            let version = self.responses.get(name)?.map(|row| row.value().1.to_owned());
            let version = version.ok_or_else(|| broken(format!("{name} is to be dropped and is not there")))?;
            return self.let_go(search, &version, (name.to_owned(), 0), missing);
        }
        let head = self.session(name)?.map(|row| row.head);
        for place in self.kept.range((name, 0)..=(name, u64::MAX))? {
            let (key, version) = place?;
            let version = version.value();
            if head.as_deref() != Some(version)
                && self.let_go(search, version, (name.to_owned(), key.value().1), missing)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn let_go(&self, search: &mut Search, version: &str, holder: Holder, missing: u64) -> Result<bool, Fault> {
        if !search.wanted.contains_key(version) {
            let row = self.known_version(version)?;
            let new = Wanted { others: row.kept_by, bytes: row.bytes, holders: Vec::new() };
            search.wanted.insert(version.to_owned(), new);
        }
        let Some(found) = search.wanted.get_mut(version) else { return Ok(false) };
        found.others = found.others.saturating_sub(1);
        found.holders.push(holder);
        // Dropping a version frees nothing until all have dropped it.
        if found.others == 0 && found.bytes > 0 {
            search.freed += found.bytes;
            search.chosen.append(&mut found.holders);
        }
        Ok(search.freed >= missing)
    }
}

impl Write<'_> {
    pub(super) fn add_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), Fault> {
        self.tables.droppable.insert((used, name), &owner.0)?;
        self.tables.droppable_by.insert((&owner.0, used, name), ())?;
        Ok(())
    }

    pub(super) fn forget_droppable(&mut self, owner: Owner, used: u64, name: &str) -> Result<(), Fault> {
        self.tables.droppable.remove((used, name))?;
        self.tables.droppable_by.remove((&owner.0, used, name))?;
        Ok(())
    }

    /// Writes down what an index of an earlier version does not order yet.
    pub(super) fn order_droppable(&mut self) -> Result<(), Fault> {
        let mut found: Vec<(Owner, u64, String)> = Vec::new();
        for entry in self.tables.droppable.iter()? {
            let (key, owner) = entry?;
            found.push((Owner(*owner.value()), key.value().0, key.value().1.to_owned()));
        }
        for entry in self.tables.responses.iter()? {
            let (name, row) = entry?;
            let (owner, _, ends, _) = row.value();
            found.push((Owner(*owner), response_place(ends), name.value().to_owned()));
        }
        found.iter().try_for_each(|(owner, used, name)| self.add_droppable(*owner, *used, name))
    }

    /// Drops what [`Tables::droppable`] named.
    pub(crate) fn drop_holders(&mut self, holders: &[Holder], lineage: usize) -> Result<(), Fault> {
        for (name, at) in holders {
            if ResponseId::parse(name).is_some() {
                let row = self.any_response(name)?;
                self.remove_response(name, &row)?;
                continue;
            }
            let old: SessionRow =
                self.tables.session(name)?.ok_or_else(|| broken(format!("session {name} has no row")))?;
            let mut row = old.clone();
            self.drop_version(name, &mut row, *at, lineage)?;
            self.put_session(name, Some(&old), &row)?;
        }
        Ok(())
    }

    /// A response that the index names, whoever's it is.
    pub(super) fn any_response(&self, name: &str) -> Result<ResponseRow, Fault> {
        let owner = self.tables.responses.get(name)?.map(|row| Owner(*row.value().0));
        let owner = owner.ok_or_else(|| broken(format!("{name} is named and is not there")))?;
        self.tables.response(owner, name)
    }
}

/// The place of a response in the order of what is dropped.
pub(super) fn response_place(ends: u64) -> u64 {
    RESPONSES | ends
}
