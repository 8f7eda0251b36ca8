//! The queries on sessions and their versions.

use super::error::IndexError;
use super::tables::{Access, Tables, damaged_row};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId};
use crate::session::index::{Head, Listed, SessionRow, VersionRow};

impl<A: Access> Tables<A> {
    /// Returns an owner's session and its head.
    pub(super) fn head(&self, owner: Owner, session: &str) -> Result<Head, IndexError> {
        let row = self.own_session(owner, session)?;
        let head = self.require_version(&row.head)?;
        Ok((row, head))
    }

    /// Lists at most `limit` of an owner's sessions in order of creation, starting after session number `after`.
    pub(super) fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, IndexError> {
        let mut found = Vec::new();
        self.visit_sessions(owner, after, newest_first, |name, row| {
            match self.require_version(&row.head) {
                Ok(head) => {
                    let id =
                        SessionId::parse(name).ok_or_else(|| damaged_row(format!("{name:?} is no session's id")))?;
                    found.push((id, (row, head)));
                }
                Err(IndexError::Row(reason)) => {
                    tracing::error!(session = name, reason, "a damaged row: the session is not listed");
                }
                Err(error) => return Err(error),
            }
            Ok(found.len() < limit)
        })?;
        Ok(found)
    }

    /// Returns a session and all versions that it lists.
    pub(super) fn versions(&self, owner: Owner, session: &str) -> Result<(SessionRow, Vec<Listed>), IndexError> {
        let row = self.own_session(owner, session)?;
        let entries = self.lineage(session)?.into_iter();
        let versions = entries.map(|entry| {
            let row = self.require_version(&entry.version)?;
            Ok(Listed { id: entry.version, row, kept: entry.kept })
        });
        Ok((row, versions.collect::<Result<_, IndexError>>()?))
    }

    /// Returns a version that a session lists; the head if `version` is `None`.
    pub(super) fn listed(&self, owner: Owner, session: &str, version: Option<&str>) -> Result<Listed, IndexError> {
        let head = self.own_session(owner, session)?.head;
        let id = version.map_or(head, str::to_owned);
        let kept = self.position(session, &id)?.map(|(_, kept)| kept).ok_or(StoreError::VERSION)?;
        Ok(Listed { row: self.require_version(&id)?, id, kept })
    }

    /// Returns an owner's version, if anything lists it.
    pub(super) fn own_version(&self, owner: Owner, id: &str) -> Result<Option<VersionRow>, IndexError> {
        Ok(self.version(id)?.filter(|row| row.owner == owner))
    }

    /// Returns an owner's version and its ancestors, newest first, at most `limit` in all.
    pub(super) fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, IndexError> {
        let (mut chain, mut next) = (Vec::new(), Some(id.to_owned()));
        while let Some(id) = next.take().filter(|_| chain.len() < limit)
            && let Some(row) = self.own_version(owner, &id)?
        {
            next.clone_from(&row.parent);
            chain.push((id, row));
        }
        Ok(chain)
    }
}
