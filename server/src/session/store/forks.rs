//! Forking: new sessions that point to an existing version. No snapshot is read or written.

use std::collections::HashMap;

use super::inner::{Inner, Store, count, new_session};
use super::types::{Fork, Receipt, ReceiptKey, Session};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{IndexError, SessionRow, Write};

/// Most rows that one fork request may write, because other requests wait for its transaction.
const MAX_FORK_ROWS: usize = 20_000;

impl Store {
    /// Creates sessions from a session's head or another version that it keeps. The session may be in use; its head is
    /// then the last commit. A receipt is stored in the same transaction.
    ///
    /// # Errors
    /// No such session or version, the owner may not have that many sessions, or the disk fails.
    pub async fn fork(
        &self,
        owner: Owner,
        id: &SessionId,
        fork: Fork,
        receipt: Option<Receipt<[Session]>>,
    ) -> Result<Vec<Session>, StoreError> {
        let Fork { from, n, metadata, ttl } = fork;
        let inner = &self.inner;
        let row = inner.live(owner, id).await?;
        inner.last_uses.record(id);
        inner.ensure_ballast().await?;
        let _room = match &receipt {
            Some(_) => Some(inner.admit_receipt_of(owner, n, metadata.as_ref().unwrap_or(&row.metadata)).await?),
            None => None,
        };
        let max_sessions = inner.options.owner_sessions;
        let source = id.clone();
        let receipt_expiry = inner.receipt_expiry();
        let forked = inner.writer.run(move |write| {
            write.check_session_quota(owner, n, max_sessions)?;
            let row = write.tables.own_session(owner, source.as_str())?;
            let from = from.as_ref().map_or(&*row.head, VersionId::as_str).to_owned();
            let ancestry = ancestry(write, source.as_str(), &from, n)?;
            let ancestry: Vec<(&str, bool)> = ancestry.iter().map(|(version, kept)| (&**version, *kept)).collect();
            let mut new = SessionRow::new(owner, &from, ttl);
            new.ttl = new.ttl.or(row.ttl);
            new.metadata = metadata.clone().unwrap_or(row.metadata);
            new.forked_from = Some((source.as_str().to_owned(), from.clone()));
            for (version, kept) in &ancestry {
                write.point(version, if *kept { n as i64 } else { 0 }, n as i64)?;
            }
            let head = write.tables.require_version(&from)?;
            let mut forks = Vec::with_capacity(n);
            for _ in 0..n {
                let id = SessionId::new();
                let row = write.add_session(id.as_str(), new.clone(), &ancestry)?;
                forks.push(new_session(&id, &row, &head).map_err(IndexError::Refused)?);
            }
            if let Some((ReceiptKey(key), answer)) = &receipt {
                write.put_receipt(owner, key, receipt_expiry, &answer(&forks))?;
            }
            Ok(forks)
        });
        let forks = forked.await.inspect_err(|error| inner.tally(error))?;
        count(&inner.counters.forks, forks.len());
        for fork in &forks {
            tracing::info!(session = %fork.id, from = %id, "session forked");
        }
        Ok(forks)
    }
}

/// A version that the session keeps and its ancestors, as far as the session lists them, oldest first, for `n` forks that
/// start from it. The flag says whether the session keeps the snapshot.
pub(super) fn ancestry(
    write: &Write<'_>,
    session: &str,
    from: &str,
    n: usize,
) -> Result<Vec<(String, bool)>, IndexError> {
    let entries = write.tables.lineage(session)?;
    let mut known: HashMap<String, bool> = entries.into_iter().map(|entry| (entry.version, entry.kept)).collect();
    if known.get(from) != Some(&true) {
        return Err(IndexError::Refused(StoreError::VERSION));
    }
    let mut ancestry = Vec::new();
    let mut next = Some(from.to_owned());
    while let Some(version) = next
        && let Some(kept) = known.remove(&version)
    {
        next = write.tables.require_version(&version)?.parent;
        ancestry.push((version, kept));
    }
    let versions = ancestry.len();
    if n.saturating_mul(versions) > MAX_FORK_ROWS {
        return Err(IndexError::Refused(StoreError::TooManyForks { n, versions, bound: MAX_FORK_ROWS }));
    }
    ancestry.reverse();
    Ok(ancestry)
}

impl Inner {
    /// Counts an error if it is a refusal for lack of space.
    pub(super) fn tally(&self, error: &StoreError) {
        if matches!(error, StoreError::Quota { .. } | StoreError::Full { .. }) {
            count(&self.counters.refused, 1);
        }
    }
}
