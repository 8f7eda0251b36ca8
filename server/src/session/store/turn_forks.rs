//! Forks that a turn creates beside its session's new version: one for each additional completion. They are committed
//! with the turn, or not at all.

use std::sync::Arc;

use super::inner::Inner;
use super::load::Prepared;
use super::types::TurnNote;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{NewVersion, Reservation, VersionRow};
use crate::session::snapshot::Snapshot;

/// A session that begins as a fork of a turn's session, from the version that the turn continues, with a version of its
/// own.
#[derive(Clone, Debug)]
pub struct TurnFork {
    /// The fork's id.
    pub id: SessionId,
    /// The id of the fork's version.
    pub version: VersionId,
    /// The version's snapshot.
    pub snapshot: Arc<Snapshot>,
    /// What the version records.
    pub note: TurnNote,
}

/// The forks that a turn creates, and the space reserved for them.
#[derive(Debug, Default)]
pub(super) struct TurnForks {
    reserved: Vec<Arc<Reservation>>,
    forks: Vec<TurnFork>,
}

/// Forks whose objects are written.
#[derive(Debug, Default)]
pub(super) struct PreparedForks {
    forks: Vec<(TurnFork, Prepared)>,
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
        let possible = inner.index.may_fork(owner, (&session, &head), n, max_sessions);
        possible.await.inspect_err(|error| inner.tally(error))?;
        let bytes = inner.codec.max_bytes() as u64;
        for _ in 0..n {
            self.reserved.push(Arc::new(inner.admit(owner, bytes).await?));
        }
        Ok(())
    }

    /// Sets the forks to create.
    pub(super) fn leave(&mut self, forks: Vec<TurnFork>) {
        self.forks = forks;
    }
}

impl Inner {
    /// Writes the objects of the forks of a session; each fork starts from `parent`.
    pub(super) async fn prepare_forks(
        self: &Arc<Self>,
        owner: Owner,
        TurnForks { reserved, forks }: TurnForks,
        parent: &VersionId,
    ) -> Result<PreparedForks, StoreError> {
        let mut reserved = reserved.into_iter();
        let mut prepared = PreparedForks { forks: Vec::with_capacity(forks.len()) };
        for fork in forks {
            let text = match self.prepare_text(owner, fork.note.text.as_ref(), None).await {
                Ok(text) => text,
                Err(error) => return Err(self.abandon_forks(prepared, error).await),
            };
            match self.prepare(owner, &fork.version, &fork.snapshot, reserved.next()).await {
                Ok(mut object) => {
                    fork.note.describe(&mut object.version.row, (&fork.id, parent));
                    object.version.add_text(text);
                    prepared.forks.push((fork, object));
                }
                Err(error) => return Err(self.abandon_forks(prepared, error).await),
            }
        }
        Ok(prepared)
    }

    /// Cleans up after the objects of forks were written but not added to the index, and returns the error.
    pub(super) async fn abandon_forks(&self, forks: PreparedForks, mut error: StoreError) -> StoreError {
        for (fork, prepared) in forks.forks {
            drop(prepared);
            error = self.abandon(&fork.version, error).await;
        }
        error
    }

    /// Logs the committed forks of `session`, and caches their snapshots.
    pub(super) fn remember_forks(&self, session: &SessionId, forks: &PreparedForks) {
        for (fork, prepared) in &forks.forks {
            tracing::info!(session = %fork.id, from = %session, "session forked");
            if prepared.version.row.seed.is_none() {
                self.remember(&fork.version, &fork.snapshot);
            }
        }
    }
}

impl PreparedForks {
    /// Returns the number of forks.
    pub(super) fn len(&self) -> usize {
        self.forks.len()
    }

    /// Returns the sessions and versions that the index is to create.
    pub(super) fn versions(&self) -> Vec<(SessionId, NewVersion)> {
        self.forks.iter().map(|(fork, prepared)| (fork.id.clone(), prepared.version.clone())).collect()
    }
}

impl TurnNote {
    /// Describes the version that a turn of `session` made from `parent`.
    pub(super) fn describe(&self, row: &mut VersionRow, (session, parent): (&SessionId, &VersionId)) {
        *row = VersionRow {
            parent: Some(parent.as_str().to_owned()),
            label: self.label.clone(),
            kind: self.kind.clone(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            session: Some(session.as_str().to_owned()),
            ..row.clone()
        };
    }
}
