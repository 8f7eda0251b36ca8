//! Creating, forking and changing sessions.

use std::collections::HashMap;

use super::error::IndexError;
use super::tables::damaged_row;
use super::transaction::Write;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{
    Answer, Create, Edit, Edited, Edits, Fork, Forks, Head, Listed, MAX_FORK_ROWS, NewReceipt, NewVersion, SessionRow,
};

impl Write<'_> {
    /// Refuses a version that exists already.
    pub(super) fn check_new(&self, version: &NewVersion) -> Result<(), IndexError> {
        if self.tables.version(version.id.as_str())?.is_some() {
            let reason = format!("version {} exists already", version.id);
            return Err(StoreError::Unavailable { reason }.into());
        }
        Ok(())
    }

    /// Adds a version that nothing points to yet, and its text.
    pub(super) fn add_new(&mut self, version: &NewVersion) -> Result<(), IndexError> {
        let NewVersion { id, row, text, reserved } = version;
        self.add_version(id.as_str(), row)?;
        if let Some(text) = text {
            self.add_text(row.owner, id.as_str(), row.parent.as_deref(), text)?;
        }
        self.change.fulfilled.extend(reserved.iter().cloned());
        Ok(())
    }

    /// Checks that an owner may create a session, and returns the one that it replaces, if any.
    pub(super) fn check_create(
        &self,
        owner: Owner,
        replaced: Option<&SessionId>,
        max_sessions: usize,
    ) -> Result<Option<SessionRow>, IndexError> {
        let old = match replaced.map(|id| self.tables.own_session(owner, id.as_str())) {
            None | Some(Err(IndexError::Refused(StoreError::NotFound { .. }))) => None,
            Some(row) => Some(row?),
        };
        self.check_session_quota(owner, usize::from(old.is_none()), max_sessions)?;
        Ok(old)
    }

    /// The receipt of a request that is about to create sessions. Refused if the key has one.
    fn answer(
        &self,
        owner: Owner,
        receipt: Option<&NewReceipt<Answer>>,
        created: &Forks,
    ) -> Result<Option<NewReceipt<Vec<u8>>>, IndexError> {
        self.check_receipt(owner, receipt)?;
        let made = receipt.map(|NewReceipt { key, now, ends, answer }| {
            let answer = (answer.0)(created)?;
            Ok::<_, StoreError>(NewReceipt { key: key.clone(), now: *now, ends: *ends, answer })
        });
        Ok(made.transpose()?)
    }

    pub(super) fn create(&mut self, create: &Create) -> Result<Head, IndexError> {
        let Create { id, row, version, replace, max_sessions, receipt } = create;
        let old = self.check_create(row.owner, Some(id).filter(|_| *replace), *max_sessions)?;
        if old.is_none() && self.tables.session(id.as_str())?.is_some() {
            return Err(StoreError::SESSION.into());
        }
        let head = match version {
            Some(version) => version.row.clone(),
            None => self.tables.kept_version(row.owner, &row.head)?,
        };
        let created = Forks { sessions: vec![(id.clone(), row.clone())], head };
        let answered = self.answer(row.owner, receipt.as_ref(), &created)?;
        if let Some(version) = version {
            self.add_new(version)?;
        }
        self.point(&row.head, 1, 1)?;
        // After the new one points to its version, which the old one may be the only one to keep.
        if let Some(old) = &old {
            self.remove_session(id.as_str(), old)?;
        }
        let row = self.add_session(id.as_str(), row.clone(), &[(&row.head, true)])?;
        if let Some(receipt) = &answered {
            self.put_receipt(row.owner, receipt)?;
        }
        let head = self.tables.require_version(&row.head)?;
        Ok((row, head))
    }

    /// A version that the session keeps and its ancestors, as far as the session lists them, oldest first, for `n` forks
    /// that start from it. The flag says whether the session keeps the snapshot. Refuses forks that the owner may not
    /// create.
    pub(super) fn check_fork(
        &self,
        owner: Owner,
        (session, from): (&str, &str),
        n: usize,
        max_sessions: usize,
    ) -> Result<Vec<(String, bool)>, IndexError> {
        self.tables.own_session(owner, session)?;
        self.check_session_quota(owner, n, max_sessions)?;
        let entries = self.tables.lineage(session)?;
        let mut known: HashMap<String, bool> = entries.into_iter().map(|entry| (entry.version, entry.kept)).collect();
        if known.get(from) != Some(&true) {
            return Err(StoreError::VERSION.into());
        }
        let mut ancestry = Vec::new();
        let mut next = Some(from.to_owned());
        while let Some(version) = next
            && let Some(kept) = known.remove(&version)
        {
            next = self.tables.require_version(&version)?.parent;
            ancestry.push((version, kept));
        }
        let versions = ancestry.len();
        if n.saturating_mul(versions) > MAX_FORK_ROWS {
            return Err(StoreError::TooManyForks { n, versions, bound: MAX_FORK_ROWS }.into());
        }
        ancestry.reverse();
        Ok(ancestry)
    }

    /// Adds sessions with these versions, of which the last is their head.
    pub(super) fn add_forks<'i>(
        &mut self,
        ids: impl ExactSizeIterator<Item = &'i SessionId>,
        new: &SessionRow,
        ancestry: &[(String, bool)],
    ) -> Result<Vec<(SessionId, SessionRow)>, IndexError> {
        let n = ids.len() as i64;
        let versions: Vec<(&str, bool)> = ancestry.iter().map(|(version, kept)| (&**version, *kept)).collect();
        for (version, kept) in &versions {
            self.point(version, if *kept { n } else { 0 }, n)?;
        }
        ids.map(|id| Ok((id.clone(), self.add_session(id.as_str(), new.clone(), &versions)?))).collect()
    }

    pub(super) fn fork(&mut self, fork: &Fork) -> Result<Forks, IndexError> {
        let Fork { owner, session, from, ids, metadata, ttl, max_sessions, now, receipt } = fork;
        let row = self.tables.own_session(*owner, session.as_str())?;
        let from = from.as_ref().map_or(&*row.head, VersionId::as_str);
        let ancestry = self.check_fork(*owner, (session.as_str(), from), ids.len(), *max_sessions)?;
        let mut new = SessionRow::new(*owner, from, ttl.or(row.ttl), *now);
        new.metadata = metadata.clone().unwrap_or(row.metadata);
        new.forked_from = Some((session.as_str().to_owned(), from.to_owned()));
        let head = self.tables.require_version(from)?;
        let planned = Forks { sessions: ids.iter().map(|id| (id.clone(), new.clone())).collect(), head };
        let answered = self.answer(*owner, receipt.as_ref(), &planned)?;
        let sessions = self.add_forks(ids.iter(), &new, &ancestry)?;
        if let Some(receipt) = &answered {
            self.put_receipt(*owner, receipt)?;
        }
        Ok(Forks { sessions, ..planned })
    }

    pub(super) fn edit(&mut self, owner: Owner, id: &str, edit: &Edit, now: u64) -> Result<Edited, IndexError> {
        let old = self.tables.own_session(owner, id)?;
        let mut row = old.clone();
        let edits = edit.apply(&mut row, now)?;
        let kept = edits.check(self.tables.keeps(id, &edits.version)?)?;
        let Edits { version, label, .. } = edits;
        let mut found = self.tables.require_version(&version)?;
        if let Some(label) = label {
            found.label = label;
            self.add_version(&version, &found)?;
        }
        self.put_session(id, Some(&old), &row)?;
        Ok(Edited { session: row, version: Listed { id: version, row: found, kept } })
    }

    /// Records last uses of sessions.
    pub(super) fn record_uses(&mut self, uses: &HashMap<SessionId, u64>) -> Result<(), IndexError> {
        for (id, used) in uses {
            let old = match self.tables.session(id.as_str()) {
                Err(IndexError::Row(reason)) => {
                    tracing::error!(session = %id, reason, "a damaged row: the session's use is not recorded");
                    continue;
                }
                found => found?,
            };
            if let Some(old) = old {
                let mut row = old.clone();
                row.used = row.used.max(*used);
                self.put_session(id.as_str(), Some(&old), &row)?;
            }
        }
        Ok(())
    }
}

/// The refusal of a request that expected another head.
pub(super) fn stale(row: &SessionRow) -> IndexError {
    match VersionId::parse(&row.head) {
        Some(head) => StoreError::Stale { head }.into(),
        None => damaged_row(format!("{:?} is no version's id", row.head)),
    }
}
