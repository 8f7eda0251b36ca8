//! Forks that a turn leaves beside its session's new version: one for each other text that it has generated. They are
//! committed with the turn, or not at all.

use std::sync::Arc;

use super::forks::ancestry;
use super::inner::Inner;
use super::load::Prepared;
use super::texts::PreparedText;
use super::types::TurnNote;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Bounds, IndexError, Reservation, SessionRow, VersionRow, Write};
use crate::session::snapshot::Snapshot;

/// A session that begins as a fork of a turn's session, from the version that the turn continues, with a version of its own.
#[derive(Clone, Debug)]
pub struct TurnFork {
    /// Its id.
    pub id: SessionId,
    /// Its version.
    pub version: VersionId,
    /// The snapshot of that.
    pub snapshot: Arc<Snapshot>,
    /// What the version records.
    pub note: TurnNote,
}

/// The forks that a turn leaves, and the space that is reserved for them.
#[derive(Debug, Default)]
pub(super) struct TurnForks {
    reserved: Vec<Arc<Reservation>>,
    forks: Vec<TurnFork>,
}

/// Forks whose objects are written.
#[derive(Debug)]
pub(super) struct PreparedForks {
    owner: Owner,
    forks: Vec<(TurnFork, Prepared, Option<PreparedText>)>,
    max_sessions: usize,
}

impl TurnForks {
    /// Reserves what `n` forks of a session from `head` need.
    pub(super) async fn reserve(
        &mut self,
        inner: &Arc<Inner>,
        owner: Owner,
        (session, head): (SessionId, VersionId),
        n: usize,
    ) -> Result<(), StoreError> {
        let max_sessions = inner.options.owner_sessions;
        let possible = inner.writer.read(move |write| {
            write.check_session_quota(owner, n, max_sessions)?;
            ancestry(write, session.as_str(), head.as_str(), n).map(drop)
        });
        possible.await.inspect_err(|error| inner.tally(error))?;
        let bytes = inner.codec.max_bytes() as u64;
        for _ in 0..n {
            self.reserved.push(Arc::new(inner.admit(owner, bytes).await?));
        }
        Ok(())
    }

    /// Sets the forks to leave.
    pub(super) fn leave(&mut self, forks: Vec<TurnFork>) {
        self.forks = forks;
    }
}

impl Inner {
    /// Writes the objects of forks.
    pub(super) async fn prepare_forks(
        self: &Arc<Self>,
        owner: Owner,
        TurnForks { reserved, forks }: TurnForks,
    ) -> Result<PreparedForks, StoreError> {
        let (mut reserved, max_sessions) = (reserved.into_iter(), self.options.owner_sessions);
        let mut prepared = PreparedForks { owner, forks: Vec::with_capacity(forks.len()), max_sessions };
        for fork in forks {
            let text = match self.prepare_text(owner, fork.note.text.as_ref(), None).await {
                Ok(text) => text,
                Err(error) => return Err(self.abandon_forks(&prepared, error).await),
            };
            match self.prepare(owner, &fork.version, &fork.snapshot, reserved.next()).await {
                Ok(object) => prepared.forks.push((fork, object, text)),
                Err(error) => return Err(self.abandon_forks(&prepared, error).await),
            }
        }
        Ok(prepared)
    }

    /// Cleans up after the objects of forks were written but not added to the index, and returns the error.
    pub(super) async fn abandon_forks(&self, forks: &PreparedForks, mut error: StoreError) -> StoreError {
        for (fork, ..) in &forks.forks {
            error = self.abandon(&fork.version, error).await;
        }
        error
    }

    /// Logs the forks of `session` that are committed, and caches their snapshots.
    pub(super) fn remember_forks(&self, session: &SessionId, forks: &PreparedForks) {
        for (fork, prepared, _) in &forks.forks {
            tracing::info!(session = %fork.id, from = %session, "session forked");
            if prepared.row.seed.is_none() {
                self.remember(&fork.version, &fork.snapshot);
            }
        }
    }
}

impl PreparedForks {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.forks.len()
    }

    /// The versions that the session lists up to `parent`, from which the forks start. Refuses forks that may not be created.
    pub(super) fn check(
        &self,
        write: &Write<'_>,
        session: &SessionId,
        parent: &VersionId,
    ) -> Result<Vec<(String, bool)>, IndexError> {
        if self.forks.is_empty() {
            return Ok(Vec::new());
        }
        write.check_session_quota(self.owner, self.forks.len(), self.max_sessions)?;
        ancestry(write, session.as_str(), parent.as_str(), self.forks.len())
    }

    /// Creates the forks of `session`, whose row before the turn is `row`.
    pub(super) fn add(
        &self,
        write: &mut Write<'_>,
        (session, row): (&SessionId, &SessionRow),
        ancestry: &[(String, bool)],
        bounds: Bounds,
    ) -> Result<(), IndexError> {
        let n = self.forks.len() as i64;
        let versions: Vec<(&str, bool)> = ancestry.iter().map(|(version, kept)| (&**version, *kept)).collect();
        for (version, kept) in &versions {
            write.point(version, if *kept { n } else { 0 }, n)?;
        }
        let mut new = SessionRow::new(self.owner, &row.head, None);
        (new.ttl, new.metadata) = (row.ttl, row.metadata.clone());
        new.forked_from = Some((session.as_str().to_owned(), row.head.clone()));
        for (fork, prepared, text) in &self.forks {
            let version = fork.note.row((&fork.id, &row.head), &prepared.row);
            write.add_version(fork.version.as_str(), &version)?;
            let old = write.add_session(fork.id.as_str(), new.clone(), &versions)?;
            let mut now = old.clone();
            write.push_head(fork.id.as_str(), &mut now, fork.version.as_str(), bounds)?;
            write.put_session(fork.id.as_str(), Some(&old), &now)?;
            if let Some(text) = text {
                text.add(write, self.owner, fork.version.as_str(), Some(&row.head))?;
            }
            write.fulfil(prepared.reservation.as_ref());
        }
        Ok(())
    }
}

impl TurnNote {
    /// The row of the version that a turn of `session` made from `parent`.
    pub(super) fn row(&self, (session, parent): (&SessionId, &str), prepared: &VersionRow) -> VersionRow {
        VersionRow {
            parent: Some(parent.to_owned()),
            label: self.label.clone(),
            kind: self.kind.clone(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            session: Some(session.as_str().to_owned()),
            ..prepared.clone()
        }
    }
}
