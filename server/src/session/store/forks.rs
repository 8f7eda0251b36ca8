//! Forks: more pointers to a version that is there. No snapshot is read or written.

use std::collections::HashMap;

use super::{Inner, Metadata, Session, Store, count};
use crate::session::index::{Fault, SessionRow, Write};
use crate::session::{Owner, SessionId, StoreError, VersionId};
use std::time::Duration;

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
        let inner = &self.inner;
        inner.live(owner, id).await?;
        inner.uses.note(id);
        inner.ballast().await?;
        let most = inner.options.owner_sessions;
        let source = id.clone();
        let forked = inner.writer.run(move |write| {
            write.room_for_sessions(owner, n, most)?;
            let row = write.tables.own_session(owner, source.as_str())?;
            let from = from.as_ref().map_or(&*row.head, VersionId::as_str).to_owned();
            let line = ancestry(write, source.as_str(), &from)?;
            let line: Vec<(&str, bool)> = line.iter().map(|(version, kept)| (&**version, *kept)).collect();
            let mut new = SessionRow::new(owner, &from, ttl);
            new.ttl = new.ttl.or(row.ttl);
            new.metadata = metadata.unwrap_or(row.metadata);
            new.forked_from = Some((source.as_str().to_owned(), from.clone()));
            for (version, kept) in &line {
                write.point(version, if *kept { n as i64 } else { 0 }, n as i64)?;
            }
            let head = write.tables.known_version(&from)?;
            let mut made = Vec::with_capacity(n);
            for _ in 0..n {
                let id = SessionId::new();
                let row = write.add_session(id.as_str(), new.clone(), &line)?;
                made.push((id, row, head.clone()));
            }
            Ok(made)
        });
        let made = forked.await.inspect_err(|error| inner.tally(error))?;
        count(&inner.counters.forks, made.len());
        made.into_iter().map(|(id, row, head)| inner.session(id, row, head)).collect()
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
