//! Ending a turn and moving a session's head.

use super::error::IndexError;
use super::sessions::stale;
use super::transaction::Write;
use crate::session::index::{Commit, Head, NewResponse, Rewind, SessionRow};

impl Write<'_> {
    pub(super) fn commit(&mut self, commit: &Commit) -> Result<Head, IndexError> {
        let Commit { owner, session, expected, version, bounds, now, receipt, .. } = commit;
        let old = self.tables.own_session(*owner, session.as_str())?;
        if old.head != expected.as_str() {
            return Err(stale(&old));
        }
        self.check_receipt(*owner, receipt.as_ref())?;
        self.check_new(version)?;
        // The forks come first, because the new head may make the session release a version that they keep.
        self.add_turn_forks(commit, &old)?;
        let mut row = old.clone();
        row.touch(*now);
        self.add_new(version)?;
        self.push_head(session.as_str(), &mut row, version.id.as_str(), *bounds)?;
        self.put_session(session.as_str(), Some(&old), &row)?;
        if let Some(receipt) = receipt {
            self.put_receipt(*owner, receipt)?;
        }
        Ok((row, version.row.clone()))
    }

    /// Creates the forks that a turn leaves beside its session, whose row before the turn is `row`.
    fn add_turn_forks(&mut self, commit: &Commit, row: &SessionRow) -> Result<(), IndexError> {
        let Commit { owner, session, expected, forks, max_sessions, bounds, now, .. } = commit;
        if forks.is_empty() {
            return Ok(());
        }
        let from = (session.as_str(), expected.as_str());
        let ancestry = self.check_fork(*owner, from, forks.len(), *max_sessions)?;
        let mut new = SessionRow::new(*owner, &row.head, row.ttl, *now);
        new.metadata.clone_from(&row.metadata);
        new.forked_from = Some((session.as_str().to_owned(), row.head.clone()));
        let added = self.add_forks(forks.iter().map(|(id, _)| id), &new, &ancestry)?;
        for ((id, old), (_, version)) in added.into_iter().zip(forks) {
            let mut row = old.clone();
            self.add_new(version)?;
            self.push_head(id.as_str(), &mut row, version.id.as_str(), *bounds)?;
            self.put_session(id.as_str(), Some(&old), &row)?;
        }
        Ok(())
    }

    pub(super) fn rewind(&mut self, rewind: &Rewind) -> Result<Head, IndexError> {
        let Rewind { owner, session, expected, to, bounds, now } = rewind;
        let old = self.tables.own_session(*owner, session.as_str())?;
        if old.head != expected.as_str() {
            return Err(stale(&old));
        }
        let head = self.tables.kept_version(*owner, to.as_str())?;
        let mut row = old.clone();
        row.touch(*now);
        self.adopt(session.as_str(), &mut row, to.as_str(), *bounds)?;
        self.put_session(session.as_str(), Some(&old), &row)?;
        Ok((row, head))
    }

    pub(super) fn store_response(&mut self, response: &NewResponse) -> Result<(), IndexError> {
        let NewResponse { id, row, version, receipt } = response;
        self.check_receipt(row.owner, receipt.as_ref())?;
        self.add_new(version)?;
        self.put_response(id.as_str(), row)?;
        if let Some(receipt) = receipt {
            self.put_receipt(row.owner, receipt)?;
        }
        Ok(())
    }
}
