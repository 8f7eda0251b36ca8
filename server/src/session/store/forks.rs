//! Forks: new sessions that point to an existing version. No snapshot is read or written.

use super::inner::{Inner, Store, count, new_session, now};
use super::types::{Fork, Receipt, Session};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId};
use crate::session::index::{self, Forks};

impl Store {
    /// Creates sessions from a session's head, or from another version that the session keeps. The session may be in
    /// use; its head is then the last commit. The receipt, if any, is stored in the same transaction.
    ///
    /// # Errors
    /// The session or version does not exist, the owner may not have that many sessions, or the disk fails.
    pub async fn fork(
        &self,
        owner: Owner,
        id: &SessionId,
        fork: Fork,
        receipt: Option<Receipt<[Session]>>,
    ) -> Result<Vec<Session>, StoreError> {
        let Fork { from, n, metadata, ttl } = fork;
        let inner = &self.inner;
        let row = inner.use_session(owner, id).await?;
        inner.index.ready().await?;
        let _room = match &receipt {
            Some(_) => Some(inner.admit_receipt_of(owner, n, metadata.as_ref().unwrap_or(&row.metadata)).await?),
            None => None,
        };
        let ids: Vec<SessionId> = (0..n).map(|_| SessionId::new()).collect();
        let fork = index::Fork {
            owner,
            session: id.clone(),
            from,
            ids: ids.clone(),
            metadata,
            ttl: ttl.map(|ttl| ttl.as_secs()),
            max_sessions: inner.options.owner_sessions,
            now: now(),
            receipt: receipt.map(|receipt| inner.receipt_of(receipt, new_sessions)),
        };
        let forked = match inner.index.fork(fork).await {
            Err(error) => inner.find_forks(owner, &ids, &error).await.ok_or(error),
            forked => forked,
        };
        let forked = forked.inspect_err(|error| inner.tally(error))?;
        let forks = new_sessions(&forked)?;
        count(&inner.counters.forks, forks.len());
        for fork in &forks {
            tracing::info!(session = %fork.id, from = %id, "session forked");
        }
        Ok(forks)
    }
}

fn new_sessions(Forks { sessions, head }: &Forks) -> Result<Vec<Session>, StoreError> {
    sessions.iter().map(|(id, row)| new_session(id, row, head)).collect()
}

impl Inner {
    /// Returns the forks with these ids if they were created, after an error that leaves this unknown.
    async fn find_forks(&self, owner: Owner, ids: &[SessionId], error: &StoreError) -> Option<Forks> {
        let (mut sessions, mut head) = (Vec::new(), None);
        for id in ids {
            let (row, version) = self.find_created(owner, id, None, error).await?;
            sessions.push((id.clone(), row));
            head = Some(version);
        }
        Some(Forks { sessions, head: head? })
    }

    /// Counts an error if it is a refusal for lack of space.
    pub(super) fn tally(&self, error: &StoreError) {
        if matches!(error, StoreError::Quota { .. } | StoreError::Full { .. }) {
            count(&self.counters.refused, 1);
        }
    }
}
