//! Which versions a session keeps and lists: those of its turns, those that it adopts from elsewhere, and the ones that
//! tags name.

use std::collections::HashSet;

use redb::ReadableTable;

use super::error::IndexError;
use super::tables::{Access, Tables, damaged_row};
use super::transaction::Write;
use crate::session::index::{Bounds, MAX_ADOPTED, SessionRow};

impl<A: Access> Tables<A> {
    /// Whether a session keeps a version that it lists; `None` if it does not list the version.
    pub(crate) fn keeps(&self, session: &str, version: &str) -> Result<Option<bool>, IndexError> {
        if self.position(session, version)?.is_some() {
            return Ok(Some(true));
        }
        Ok(self.known_position(session, version)?.map(|_| false))
    }

    /// The position of a version among those that the session lists without their snapshots.
    fn known_position(&self, session: &str, version: &str) -> Result<Option<u64>, IndexError> {
        for entry in self.known.range((session, 0)..=(session, u64::MAX))? {
            let (key, found) = entry?;
            if found.value() == version {
                return Ok(Some(key.value().1));
            }
        }
        Ok(None)
    }
}

impl Write<'_> {
    /// Appends a version to the session, as its head.
    pub(crate) fn push_head(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        bounds: Bounds,
    ) -> Result<(), IndexError> {
        self.append(id, row, version, true)?;
        self.point(version, 1, 1)?;
        version.clone_into(&mut row.head);
        self.release_beyond(id, row, bounds)
    }

    /// Makes an existing version of the same owner the session's head, even one that the session does not list. Those of its
    /// ancestors that the session does not list yet are listed as well, and the newest of them are kept if anything still
    /// keeps them.
    pub(crate) fn adopt(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        bounds: Bounds,
    ) -> Result<(), IndexError> {
        self.tables.kept_version(row.owner, version)?;
        version.clone_into(&mut row.head);
        if self.tables.position(id, version)?.is_some() {
            return Ok(());
        }
        if let Some(position) = self.tables.known_position(id, version)? {
            self.tables.known.remove((id, position))?;
            row.known -= 1;
            self.point(version, 1, 0)?;
        } else {
            self.adopt_ancestors(id, row, version, bounds)?;
            self.point(version, 1, 1)?;
        }
        self.append(id, row, version, true)?;
        self.release_beyond(id, row, bounds)
    }

    /// Lists a version's ancestors up to the first that the session lists already.
    fn adopt_ancestors(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        bounds: Bounds,
    ) -> Result<(), IndexError> {
        let listed: HashSet<String> = self.tables.lineage(id)?.into_iter().map(|entry| entry.version).collect();
        let most = bounds.keep.saturating_add(bounds.lineage).min(MAX_ADOPTED);
        let mut ancestors = Vec::new();
        let mut next = self.tables.require_version(version)?.parent;
        while let Some(ancestor) = next.filter(|ancestor| ancestors.len() < most && !listed.contains(ancestor))
            && let Some(found) = self.tables.version(&ancestor)?.filter(|found| found.owner == row.owner)
        {
            // One of the snapshots is the head's.
            let kept = found.kept_by > 0 && ancestors.len() + 1 < bounds.keep;
            ancestors.push((ancestor, kept));
            next = found.parent;
        }
        for (ancestor, kept) in ancestors.iter().rev() {
            self.append(id, row, ancestor, *kept)?;
            self.point(ancestor, i64::from(*kept), 1)?;
        }
        Ok(())
    }

    /// Adds a version to the end of a session's list.
    fn append(&mut self, id: &str, row: &mut SessionRow, version: &str, kept: bool) -> Result<(), IndexError> {
        let (table, count) =
            if kept { (&mut self.tables.kept, &mut row.kept) } else { (&mut self.tables.known, &mut row.known) };
        table.insert((id, row.next), version)?;
        *count += 1;
        row.next += 1;
        Ok(())
    }

    /// Releases the oldest snapshots beyond the bound, but not the head's and not those of tagged versions, which do not
    /// count either.
    fn release_beyond(&mut self, id: &str, row: &mut SessionRow, bounds: Bounds) -> Result<(), IndexError> {
        let (beyond, tagged) = (row.kept.saturating_sub(bounds.keep as u64), row.tagged_versions());
        let (mut releasable, mut count) = (Vec::new(), 0);
        for entry in self.tables.kept.range((id, 0)..=(id, u64::MAX))? {
            // Tagged versions must be counted, and so all versions are visited if there are any.
            if count >= beyond && (tagged.is_empty() || beyond == 0) {
                break;
            }
            let (key, version) = entry?;
            if version.value() != row.head && !tagged.contains(version.value()) {
                count += 1;
                releasable.push(key.value().1);
            }
        }
        if !tagged.is_empty() {
            // The head counts, tagged or not.
            releasable.truncate((releasable.len() + 1).saturating_sub(bounds.keep));
        }
        releasable.into_iter().try_for_each(|position| self.drop_version(id, row, position, bounds.lineage))?;
        self.unlist_beyond(id, row, bounds.lineage)
    }

    /// Releases a version's snapshot; the session still lists the version. Beyond `lineage` such versions, the oldest are
    /// removed from the list.
    pub(crate) fn drop_version(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        position: u64,
        lineage: usize,
    ) -> Result<(), IndexError> {
        let Some(version) = self.tables.kept.remove((id, position))?.map(|version| version.value().to_owned()) else {
            return Err(damaged_row(format!("session {id} keeps no version at position {position}")));
        };
        self.tables.known.insert((id, position), &*version)?;
        row.kept -= 1;
        row.known += 1;
        self.point(&version, -1, 0)?;
        self.unlist_beyond(id, row, lineage)
    }

    /// Removes the oldest versions without snapshots from a session's list, and their tags.
    fn unlist_beyond(&mut self, id: &str, row: &mut SessionRow, lineage: usize) -> Result<(), IndexError> {
        while row.known > lineage as u64 {
            let oldest = match self.tables.known.range((id, 0)..=(id, u64::MAX))?.next().transpose()? {
                Some((key, version)) => (key.value().1, version.value().to_owned()),
                None => return Err(damaged_row(format!("session {id} lists fewer versions than its row says"))),
            };
            self.tables.known.remove((id, oldest.0))?;
            row.known -= 1;
            row.tags.retain(|_, version| *version != oldest.1);
            self.point(&oldest.1, 0, -1)?;
        }
        Ok(())
    }
}
