//! Forks: more pointers to a version that is there. No snapshot is read or written.

use std::collections::HashMap;

use super::{Fork, Inner, Metadata, Receipt, ReceiptKey, Session, Store, count, new_session, now};
use crate::session::index::{Fault, SessionRow, Write};
use crate::session::{Owner, SessionId, StoreError, VersionId};
use std::time::Duration;

/// Places of versions that one request writes at most: all wait for its transaction.
const MOST_ROWS: usize = 20_000;

impl Store {
    /// Makes `n` sessions that go on from a session's head, or from another version that it keeps. It may be in use:
    /// its head is its last commit. Metadata and time to live are the session's own where none are given.
    ///
    /// # Errors
    /// There is no such session or version, the owner may not have as many sessions, or the disk fails.
    pub async fn fork(
        &self,
        owner: Owner,
        id: &SessionId,
        from: Option<VersionId>,
        n: usize,
        metadata: Option<Metadata>,
        ttl: Option<Duration>,
    ) -> Result<Vec<Session>, StoreError> {
        self.fork_once(owner, id, Fork { from, n, metadata, ttl }, None).await
    }

    /// As [`Self::fork`], and keeps the receipt with the sessions.
    ///
    /// # Errors
    /// As [`Self::fork`].
    pub async fn fork_once(
        &self,
        owner: Owner,
        id: &SessionId,
        fork: Fork,
        receipt: Option<Receipt<[Session]>>,
    ) -> Result<Vec<Session>, StoreError> {
        let Fork { from, n, metadata, ttl } = fork;
        let inner = &self.inner;
        inner.live(owner, id).await?;
        inner.uses.note(id);
        inner.ballast().await?;
        let most = inner.options.owner_sessions;
        let source = id.clone();
        let receipt_ends = now().saturating_add(inner.options.receipt_ttl.as_millis() as u64);
        let forked = inner.writer.run(move |write| {
            write.room_for_sessions(owner, n, most)?;
            let row = write.tables.own_session(owner, source.as_str())?;
            let from = from.as_ref().map_or(&*row.head, VersionId::as_str).to_owned();
            let line = ancestry(write, source.as_str(), &from)?;
            let rows = n.saturating_mul(line.len());
            if rows > MOST_ROWS {
                return Err(Fault::Refused(StoreError::Forks { n, versions: line.len(), bound: MOST_ROWS }));
            }
            let line: Vec<(&str, bool)> = line.iter().map(|(version, kept)| (&**version, *kept)).collect();
            let mut new = SessionRow::new(owner, &from, ttl);
            new.ttl = new.ttl.or(row.ttl);
            new.metadata = metadata.clone().unwrap_or(row.metadata);
            new.forked_from = Some((source.as_str().to_owned(), from.clone()));
            for (version, kept) in &line {
                write.point(version, if *kept { n as i64 } else { 0 }, n as i64)?;
            }
            let head = write.tables.known_version(&from)?;
            let mut made = Vec::with_capacity(n);
            for _ in 0..n {
                let id = SessionId::new();
                let row = write.add_session(id.as_str(), new.clone(), &line)?;
                made.push(new_session(&id, &row, &head).map_err(Fault::Refused)?);
            }
            if let Some((ReceiptKey(key), answer)) = &receipt {
                write.put_receipt(owner, key, receipt_ends, &answer(&made))?;
            }
            Ok(made)
        });
        let made = forked.await.inspect_err(|error| inner.tally(error))?;
        count(&inner.counters.forks, made.len());
        Ok(made)
    }
}

/// A version that a session keeps and those that it grew from, as far as the session knows them, oldest first; and
/// which of them it keeps.
fn ancestry(write: &Write<'_>, session: &str, from: &str) -> Result<Vec<(String, bool)>, Fault> {
    let places = write.tables.lineage(session)?;
    let mut known: HashMap<String, bool> = places.into_iter().map(|place| (place.version, place.kept)).collect();
    if known.get(from) != Some(&true) {
        return Err(Fault::Refused(StoreError::VERSION));
    }
    let mut line = Vec::new();
    let mut next = Some(from.to_owned());
    while let Some(version) = next
        && let Some(kept) = known.remove(&version)
    {
        next = write.tables.known_version(&version)?.parent;
        line.push((version, kept));
    }
    line.reverse();
    Ok(line)
}

impl Inner {
    /// Counts a refusal for want of room.
    pub(super) fn tally(&self, error: &StoreError) {
        if matches!(error, StoreError::Quota { .. } | StoreError::Full { .. }) {
            count(&self.counters.refused, 1);
        }
    }
}
