//! A version's chain of ancestors, across forks, and the common ancestor of two chains.

use std::collections::{HashSet, VecDeque};

use super::inner::{Store, version, version_id};
use super::types::{ChainFrom, Version};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::Index;

/// Maximum number of versions of each chain that are read to find a common ancestor.
const MAX_STEPS: usize = 20_000;

/// Number of versions of a chain that are read at once.
const PART: usize = 200;

impl Store {
    /// Returns a version and its ancestors, newest first, as far back as any session lists them, and whether there are
    /// more than `limit`. Their tags are those of the session `id`; `kept` says whether anything keeps the snapshot.
    ///
    /// # Errors
    /// The session or version does not exist.
    pub async fn chain(
        &self,
        owner: Owner,
        id: &SessionId,
        from: ChainFrom,
        limit: usize,
    ) -> Result<(Vec<Version>, bool), StoreError> {
        let row = self.inner.live(owner, id).await?;
        let (from, skipped) = match &from {
            ChainFrom::Version(version) => (version, 0),
            ChainFrom::After(version) => (version, 1),
        };
        let most = limit.saturating_add(skipped);
        let mut found = self.inner.index.chain(owner, from.as_str(), most.saturating_add(1)).await?;
        if found.is_empty() {
            return Err(StoreError::VERSION);
        }
        let more = found.len() > most;
        found.truncate(most);
        let versions = found.into_iter().skip(skipped).map(|(id, found)| {
            let kept = found.kept_by > 0;
            Ok::<_, StoreError>(Version { tags: row.tags_of(&id), ..version(&id, found, kept)? })
        });
        Ok((versions.collect::<Result<_, StoreError>>()?, more))
    }

    /// Returns the newest version that is in both chains; `None` if there is none.
    ///
    /// # Errors
    /// A version does not exist, or the common ancestor is too far back.
    pub async fn common_ancestor(
        &self,
        owner: Owner,
        one: VersionId,
        other: VersionId,
    ) -> Result<Option<VersionId>, StoreError> {
        // The chains are followed in alternation, so the first version seen twice is where they meet.
        let mut ends = [Chain::new(&one), Chain::new(&other)];
        let mut seen = HashSet::new();
        for step in 0..MAX_STEPS {
            for end in &mut ends {
                match end.next(&*self.inner.index, owner).await? {
                    Some(id) if !seen.insert(id.clone()) => return version_id(&id).map(Some),
                    None if step == 0 => return Err(StoreError::VERSION),
                    _ => {}
                }
            }
            if ends.iter().all(Chain::has_ended) {
                return Ok(None);
            }
        }
        Err(StoreError::FarAncestor { bound: MAX_STEPS })
    }
}

/// A chain of versions that is read in parts.
struct Chain {
    read: VecDeque<String>,
    /// The version that follows those already read.
    next: Option<String>,
}

impl Chain {
    fn new(version: &VersionId) -> Self {
        Self { read: VecDeque::new(), next: Some(version.as_str().to_owned()) }
    }

    async fn next(&mut self, index: &dyn Index, owner: Owner) -> Result<Option<String>, StoreError> {
        if self.read.is_empty()
            && let Some(next) = self.next.take()
        {
            let found = index.chain(owner, &next, PART).await?;
            self.next = found.last().and_then(|(_, row)| row.parent.clone());
            self.read.extend(found.into_iter().map(|(id, _)| id));
        }
        Ok(self.read.pop_front())
    }

    fn has_ended(&self) -> bool {
        self.read.is_empty() && self.next.is_none()
    }
}
