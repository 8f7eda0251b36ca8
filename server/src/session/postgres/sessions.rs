//! Creating, forking, changing and removing sessions, and ending turns.

use std::collections::HashMap;

use super::failure::damaged;
use super::work::Work;
use crate::session::error::StoreError;
use crate::session::id::{SessionId, VersionId};
use crate::session::index::{
    Answer, Commit, Create, Edit, Edited, Edits, Fork, Forks, Head, Listed, MAX_FORK_ROWS, NewReceipt, NewResponse,
    Rewind, SessionRow,
};

impl Work {
    /// Checks that the owner may create a session, and says whether there is one to replace.
    pub(super) fn check_create(&self, replaced: Option<&SessionId>, max_sessions: usize) -> Result<bool, StoreError> {
        let replaces = replaced.is_some_and(|id| self.own_session(id.as_str()).is_ok());
        self.check_session_quota(usize::from(!replaces), max_sessions)?;
        Ok(replaces)
    }

    /// The receipt of a request that is about to create sessions. Refused if the key has one.
    fn answer(
        &self,
        receipt: Option<&NewReceipt<Answer>>,
        created: &Forks,
    ) -> Result<Option<NewReceipt<Vec<u8>>>, StoreError> {
        self.check_receipt(receipt)?;
        let made = receipt.map(|NewReceipt { key, now, ends, answer }| {
            let answer = (answer.0)(created)?;
            Ok(NewReceipt { key: key.clone(), now: *now, ends: *ends, answer })
        });
        made.transpose()
    }

    pub(super) fn create(&mut self, create: &Create) -> Result<Head, StoreError> {
        let Create { id, row, version, replace, max_sessions, receipt } = create;
        let replaces = self.check_create(Some(id).filter(|_| *replace), *max_sessions)?;
        if !replaces && self.session(id.as_str()).is_some() {
            return Err(StoreError::SESSION);
        }
        let head = match version {
            Some(version) => version.row.clone(),
            None => self.kept_version(&row.head)?,
        };
        let created = Forks { sessions: vec![(id.clone(), row.clone())], head };
        let answered = self.answer(receipt.as_ref(), &created)?;
        if let Some(version) = version {
            self.add_new(version);
        }
        self.point(&row.head, 1, 1)?;
        // After the new one points to its version, which the old one may be the only one to keep.
        if replaces {
            self.remove_session(id.as_str())?;
        }
        let row = self.add_session(id.as_str(), row.clone(), &[(row.head.clone(), true)]);
        if let Some(receipt) = &answered {
            self.put_receipt(receipt);
        }
        let head = self.require_version(&row.head)?;
        Ok((row, head))
    }

    /// A version that the session keeps and its ancestors, as far as the session lists them, oldest first, for `n` forks that
    /// start from it. The flag says whether the session keeps the object. Refuses forks that the owner may not create.
    pub(super) fn check_fork(
        &self,
        (session, from): (&str, &str),
        n: usize,
        max_sessions: usize,
    ) -> Result<Vec<(String, bool)>, StoreError> {
        self.own_session(session)?;
        self.check_session_quota(n, max_sessions)?;
        let mut known: HashMap<&str, bool> =
            self.list(session).values().map(|(version, kept)| (version.as_str(), *kept)).collect();
        if known.get(from) != Some(&true) {
            return Err(StoreError::VERSION);
        }
        let mut ancestry = Vec::new();
        let mut next = Some(from.to_owned());
        while let Some(version) = next
            && let Some(kept) = known.remove(version.as_str())
        {
            next = self.require_version(&version)?.parent;
            ancestry.push((version, kept));
        }
        let versions = ancestry.len();
        if n.saturating_mul(versions) > MAX_FORK_ROWS {
            return Err(StoreError::TooManyForks { n, versions, bound: MAX_FORK_ROWS });
        }
        ancestry.reverse();
        Ok(ancestry)
    }

    /// Adds sessions with these versions, of which the last is their head.
    fn add_forks<'i>(
        &mut self,
        ids: impl ExactSizeIterator<Item = &'i SessionId>,
        new: &SessionRow,
        ancestry: &[(String, bool)],
    ) -> Result<Vec<(SessionId, SessionRow)>, StoreError> {
        let n = ids.len() as i64;
        for (version, kept) in ancestry {
            self.point(version, if *kept { n } else { 0 }, n)?;
        }
        Ok(ids.map(|id| (id.clone(), self.add_session(id.as_str(), new.clone(), ancestry))).collect())
    }

    pub(super) fn fork(&mut self, fork: &Fork) -> Result<Forks, StoreError> {
        let Fork { session, from, ids, metadata, ttl, max_sessions, now, receipt, .. } = fork;
        let row = self.own_session(session.as_str())?;
        let from = from.as_ref().map_or(&*row.head, VersionId::as_str);
        let ancestry = self.check_fork((session.as_str(), from), ids.len(), *max_sessions)?;
        let mut new = SessionRow::new(self.owner, from, ttl.or(row.ttl), *now);
        new.metadata = metadata.clone().unwrap_or(row.metadata);
        new.forked_from = Some((session.as_str().to_owned(), from.to_owned()));
        let head = self.require_version(from)?;
        let planned = Forks { sessions: ids.iter().map(|id| (id.clone(), new.clone())).collect(), head };
        let answered = self.answer(receipt.as_ref(), &planned)?;
        let sessions = self.add_forks(ids.iter(), &new, &ancestry)?;
        if let Some(receipt) = &answered {
            self.put_receipt(receipt);
        }
        Ok(Forks { sessions, ..planned })
    }

    pub(super) fn edit(&mut self, id: &str, edit: &Edit, now: u64) -> Result<Edited, StoreError> {
        let mut row = self.own_session(id)?;
        let edits = edit.apply(&mut row, now)?;
        let kept = edits.check(self.position(id, &edits.version).map(|(_, kept)| kept))?;
        let Edits { version, label, .. } = edits;
        let mut found = self.require_version(&version)?;
        if let Some(label) = label
            && let Some(pair) = self.versions.get_mut(&version)
        {
            found.label = label;
            pair.new = Some(found.clone());
        }
        self.put_session(id, Some(row.clone()));
        Ok(Edited { session: row, version: Listed { id: version, row: found, kept } })
    }

    /// The owner's session, if this is its head.
    fn session_at(&self, session: &SessionId, expected: &VersionId) -> Result<SessionRow, StoreError> {
        let row = self.own_session(session.as_str())?;
        if row.head == expected.as_str() {
            return Ok(row);
        }
        let head = VersionId::parse(&row.head);
        Err(head
            .map_or_else(|| damaged(format!("{:?} is no version's id", row.head)), |head| StoreError::Stale { head }))
    }

    pub(super) fn commit(&mut self, commit: &Commit) -> Result<Head, StoreError> {
        let Commit { session, expected, version, bounds, now, receipt, .. } = commit;
        let mut row = self.session_at(session, expected)?;
        self.check_receipt(receipt.as_ref())?;
        // The forks come first, because the new head may make the session release a version that they keep.
        self.add_turn_forks(commit, &row)?;
        row.touch(*now);
        self.add_new(version);
        self.push_head(session.as_str(), &mut row, version.id.as_str(), *bounds)?;
        self.put_session(session.as_str(), Some(row.clone()));
        if let Some(receipt) = receipt {
            self.put_receipt(receipt);
        }
        Ok((row, version.row.clone()))
    }

    /// Creates the forks that a turn leaves beside its session, whose row before the turn is `row`.
    fn add_turn_forks(&mut self, commit: &Commit, row: &SessionRow) -> Result<(), StoreError> {
        let Commit { session, expected, forks, max_sessions, bounds, now, .. } = commit;
        if forks.is_empty() {
            return Ok(());
        }
        let from = (session.as_str(), expected.as_str());
        let ancestry = self.check_fork(from, forks.len(), *max_sessions)?;
        let mut new = SessionRow::new(self.owner, &row.head, row.ttl, *now);
        new.metadata.clone_from(&row.metadata);
        new.forked_from = Some((session.as_str().to_owned(), row.head.clone()));
        let added = self.add_forks(forks.iter().map(|(id, _)| id), &new, &ancestry)?;
        for ((id, mut row), (_, version)) in added.into_iter().zip(forks) {
            self.add_new(version);
            self.push_head(id.as_str(), &mut row, version.id.as_str(), *bounds)?;
            self.put_session(id.as_str(), Some(row));
        }
        Ok(())
    }

    pub(super) fn rewind(&mut self, rewind: &Rewind) -> Result<Head, StoreError> {
        let Rewind { session, expected, to, bounds, now, .. } = rewind;
        let mut row = self.session_at(session, expected)?;
        let head = self.kept_version(to.as_str())?;
        row.touch(*now);
        self.adopt(session.as_str(), &mut row, to.as_str(), *bounds)?;
        self.put_session(session.as_str(), Some(row.clone()));
        Ok((row, head))
    }

    pub(super) fn store_response(&mut self, response: &NewResponse) -> Result<(), StoreError> {
        let NewResponse { id, row, version, receipt } = response;
        self.check_receipt(receipt.as_ref())?;
        self.add_new(version);
        self.put_response(id.as_str(), row.clone())?;
        if let Some(receipt) = receipt {
            self.put_receipt(receipt);
        }
        Ok(())
    }
}
