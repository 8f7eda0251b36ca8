//! Turns that another server has begun, and perhaps committed, and that this server runs again.

use std::sync::Arc;
use std::time::Duration;

use super::{Expectation, Origin, Turn};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::store::inner::{Inner, Store};
use crate::session::store::types::{Session, Tier};

/// How a turn began, so that it can be run again.
#[derive(Clone, Debug)]
pub struct Restart {
    /// The version from which the turn starts, whatever the session's head is by now.
    pub from: VersionId,
    /// Where that version's snapshot was found in the first run.
    pub tier: Tier,
    /// Whether the client named the version.
    pub named: bool,
}

impl Store {
    /// Like [`Self::begin`], for a turn that another server has begun. The turn is committed only if the session's head
    /// is still the version from which it starts; if it has already been committed, that counts as its commit.
    ///
    /// # Errors
    /// Same as [`Self::begin`], or the version from which it starts is no longer kept.
    pub async fn begin_again(
        &self,
        owner: Owner,
        id: &SessionId,
        restart: &Restart,
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        let Restart { from, tier, named } = restart;
        let inner = &self.inner;
        inner.check_reach()?;
        let (lease, expectation, mut row, mut head) = inner.hold(owner, id, None, wait).await?;
        let expectation = Expectation { named: *named, ..expectation };
        if row.head != from.as_str() {
            head = inner.version_row(owner, from).await?;
            from.as_str().clone_into(&mut row.head);
        }
        let reserved = Arc::new(inner.admit(owner, inner.codec.max_bytes() as u64).await?);
        let (head, session) = (inner.fetch(from, &head).await?.0, inner.session(id.clone(), row, head)?);
        let origin = Origin { session, absent: None, head, tier: *tier };
        let mut turn = Turn::new(inner, owner, origin, (lease, expectation, reserved));
        turn.may_repeat();
        Ok(turn)
    }
}

impl Turn {
    /// Returns how the turn began, for another server that runs it again.
    pub fn restart(&self) -> Restart {
        Restart { from: self.session.head.id.clone(), tier: self.tier, named: self.expectation.named }
    }

    /// Marks the turn as one that another server may run again, and commit as the same version.
    pub fn may_repeat(&mut self) {
        self.repeats = true;
    }
}

impl Inner {
    /// Returns the session if it lists the version, which means that another server has committed the turn that creates
    /// it.
    pub(super) async fn committed(
        &self,
        owner: Owner,
        id: &SessionId,
        version: &VersionId,
    ) -> Result<Option<Session>, StoreError> {
        match self.index.listed(owner, id, Some(version)).await {
            Ok(_) => {
                let (row, head) = self.index.head(owner, id).await?;
                self.session(id.clone(), row, head).map(Some)
            }
            // If the session itself is missing, the commit reports it.
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
