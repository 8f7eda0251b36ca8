//! The chain of a version's ancestors, across forks, and where two chains meet.

use std::collections::HashSet;

use super::inner::{Store, version, version_id};
use super::types::{ChainFrom, Version};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{IndexError, ReadOnly, Tables, VersionRow};

/// Most versions of each chain that are read to find where two of them meet.
const MAX_STEPS: usize = 20_000;

impl Store {
    /// A version and its ancestors, the newest first, as far back as any session lists them, and whether there are more than
    /// `limit`. They have the tags of the session `id`, and `kept` says whether anything keeps the snapshot.
    ///
    /// # Errors
    /// No such session or version.
    pub async fn chain(
        &self,
        owner: Owner,
        id: &SessionId,
        from: ChainFrom,
        limit: usize,
    ) -> Result<(Vec<Version>, bool), StoreError> {
        self.inner.live(owner, id).await?;
        let name = id.clone();
        let found = self.inner.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            let mut next = match &from {
                ChainFrom::Version(version) => {
                    own_version(tables, owner, version.as_str()).map(|_| Some(version.to_string()))
                }
                ChainFrom::After(version) => own_version(tables, owner, version.as_str()).map(|row| row.parent),
            }?;
            let mut versions = Vec::new();
            while let Some(id) = next.take()
                && let Some(found) = own(tables, owner, &id)?
            {
                if versions.len() == limit {
                    return Ok((versions, true));
                }
                next.clone_from(&found.parent);
                versions.push((row.tags_of(&id), id, found));
            }
            Ok((versions, false))
        });
        let (versions, more) = found.await?;
        let versions = versions.into_iter().map(|(tags, id, row)| {
            let kept = row.kept_by > 0;
            Ok(Version { tags, ..version(&id, row, kept)? })
        });
        Ok((versions.collect::<Result<_, _>>()?, more))
    }

    /// The newest version that is in the chains of both; `None` if there is none.
    ///
    /// # Errors
    /// No such version, or the common ancestor is too far back.
    pub async fn common_ancestor(
        &self,
        owner: Owner,
        one: VersionId,
        other: VersionId,
    ) -> Result<Option<VersionId>, StoreError> {
        let found = self.inner.read(move |tables| {
            own_version(tables, owner, one.as_str())?;
            own_version(tables, owner, other.as_str())?;
            meeting_point(tables, owner, one.as_str(), other.as_str())
        });
        found.await?.as_deref().map(version_id).transpose()
    }
}

/// An owner's version, if any session or response still lists it.
fn own(tables: &Tables<ReadOnly>, owner: Owner, id: &str) -> Result<Option<VersionRow>, IndexError> {
    Ok(tables.version(id)?.filter(|row| row.owner == owner))
}

pub(super) fn own_version(tables: &Tables<ReadOnly>, owner: Owner, id: &str) -> Result<VersionRow, IndexError> {
    own(tables, owner, id)?.ok_or(IndexError::Refused(StoreError::VERSION))
}

/// The first version that two chains share: both are followed in turn, so the first that is seen twice is where they meet.
fn meeting_point(
    tables: &Tables<ReadOnly>,
    owner: Owner,
    one: &str,
    other: &str,
) -> Result<Option<String>, IndexError> {
    let mut ends = [Some(one.to_owned()), Some(other.to_owned())];
    let mut seen = HashSet::new();
    for _ in 0..MAX_STEPS {
        for end in &mut ends {
            let Some(id) = end.take() else { continue };
            let Some(row) = own(tables, owner, &id)? else { continue };
            if !seen.insert(id.clone()) {
                return Ok(Some(id));
            }
            *end = row.parent;
        }
        if ends.iter().all(Option::is_none) {
            return Ok(None);
        }
    }
    Err(IndexError::Refused(StoreError::FarAncestor { bound: MAX_STEPS }))
}
