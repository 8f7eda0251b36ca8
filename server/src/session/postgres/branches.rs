//! Which versions a session keeps and lists: those of its turns, and those that it adopts from elsewhere.

use std::collections::HashSet;

use super::failure::damaged;
use super::work::Work;
use crate::session::error::StoreError;
use crate::session::index::{Bounds, SessionRow};

impl Work {
    /// Appends a version to a session, as its head.
    pub(super) fn push_head(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        bounds: Bounds,
    ) -> Result<(), StoreError> {
        self.append(id, row, version, true);
        self.point(version, 1, 1)?;
        version.clone_into(&mut row.head);
        self.release_beyond(id, row, bounds)
    }

    /// Makes an existing version the session's head, even one that the session does not list. Those of its ancestors that
    /// the session does not list yet are listed as well, and the newest of them are kept if anything still keeps them.
    /// All that the session lists was read, and the version's ancestors.
    pub(super) fn adopt(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        version: &str,
        bounds: Bounds,
    ) -> Result<(), StoreError> {
        version.clone_into(&mut row.head);
        match self.position(id, version) {
            Some((_, true)) => return Ok(()),
            Some((position, false)) => {
                self.put_entry(id, position, None);
                row.known -= 1;
                self.point(version, 1, 0)?;
            }
            None => {
                self.adopt_ancestors(id, row, bounds)?;
                self.point(version, 1, 1)?;
            }
        }
        self.append(id, row, version, true);
        self.release_beyond(id, row, bounds)
    }

    /// Lists the ancestors of the version at the head of the chain, up to the first that the session lists already.
    fn adopt_ancestors(&mut self, id: &str, row: &mut SessionRow, bounds: Bounds) -> Result<(), StoreError> {
        let listed: HashSet<&String> = self.list(id).values().map(|(version, _)| version).collect();
        let chain = self.chain.iter().skip(1).take_while(|ancestor| !listed.contains(ancestor));
        let mut ancestors = Vec::new();
        for (at, ancestor) in chain.enumerate() {
            // One of the objects is the head's.
            let kept = self.require_version(ancestor)?.kept_by > 0 && at + 1 < bounds.keep;
            ancestors.push((ancestor.clone(), kept));
        }
        for (ancestor, kept) in ancestors.iter().rev() {
            self.append(id, row, ancestor, *kept);
            self.point(ancestor, i64::from(*kept), 1)?;
        }
        Ok(())
    }

    /// Adds a version to the end of a session's list.
    fn append(&mut self, id: &str, row: &mut SessionRow, version: &str, kept: bool) {
        self.put_entry(id, row.next, Some((version.to_owned(), kept)));
        if kept {
            row.kept += 1;
        } else {
            row.known += 1;
        }
        row.next += 1;
    }

    /// Releases the oldest objects beyond the bound, but not the head's and not those of tagged versions, which do not count
    /// either.
    fn release_beyond(&mut self, id: &str, row: &mut SessionRow, bounds: Bounds) -> Result<(), StoreError> {
        let tagged = row.tagged_versions();
        let free = |(version, kept): &(String, bool)| *kept && *version != row.head && !tagged.contains(&**version);
        let mut releasable: Vec<u64> =
            self.list(id).iter().filter(|(_, entry)| free(entry)).map(|(at, _)| *at).collect();
        // The head counts, tagged or not.
        releasable.truncate((releasable.len() + 1).saturating_sub(bounds.keep));
        releasable.into_iter().try_for_each(|position| self.drop_version(id, row, position, bounds.lineage))?;
        self.unlist_beyond(id, row, bounds.lineage)
    }

    /// Releases a version's object; the session still lists the version. Beyond `lineage` such versions, the oldest are
    /// removed from the list.
    pub(super) fn drop_version(
        &mut self,
        id: &str,
        row: &mut SessionRow,
        position: u64,
        lineage: usize,
    ) -> Result<(), StoreError> {
        let Some((version, true)) = self.list(id).get(&position).cloned() else {
            return Err(damaged(format!("session {id} keeps no version at position {position}")));
        };
        self.put_entry(id, position, Some((version.clone(), false)));
        row.kept -= 1;
        row.known += 1;
        self.point(&version, -1, 0)?;
        self.unlist_beyond(id, row, lineage)
    }

    /// Removes the oldest versions without objects from a session's list, and their tags.
    fn unlist_beyond(&mut self, id: &str, row: &mut SessionRow, lineage: usize) -> Result<(), StoreError> {
        while row.known > lineage as u64 {
            let oldest = self.list(id).iter().find(|(_, (_, kept))| !kept);
            let Some((position, (version, _))) = oldest.map(|(at, entry)| (*at, entry.clone())) else {
                return Err(damaged(format!("session {id} lists fewer versions than its row says")));
            };
            self.put_entry(id, position, None);
            row.known -= 1;
            row.tags.retain(|_, tagged| *tagged != version);
            self.point(&version, 0, -1)?;
        }
        Ok(())
    }
}
