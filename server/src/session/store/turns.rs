//! Turns: from a session's head to a new one, or to nothing at all.

use std::sync::Arc;
use std::time::Duration;

use super::{Inner, ReceiptKey, Session, Store, Tier, TurnNote, Uses, count, detached, now};
use crate::session::index::{Reservation, SessionRow, VersionRow};
use crate::session::lease::Lease;
use crate::session::{Owner, SessionId, Snapshot, StoreError, VersionId};

/// A session in use. Dropping it frees the session and changes nothing.
pub struct Turn {
    inner: Arc<Inner>,
    owner: Owner,
    session: Session,
    head: Arc<Snapshot>,
    tier: Tier,
    held: Held,
    /// For the version that it makes, as large as any can be.
    room: Arc<Reservation>,
}

/// A session's lease; the session was last used when it is given back.
struct Held {
    lease: Option<Lease>,
    uses: Uses,
    id: SessionId,
}

impl Drop for Held {
    fn drop(&mut self) {
        // First this: a session that nobody holds must not look unused.
        self.uses.note(&self.id);
        self.lease = None;
    }
}

impl Store {
    /// Takes a session for a turn. One that is in use is waited for as long as `wait`, after those who came before.
    ///
    /// # Errors
    /// There is no such session, it is in use, its head is not `if_match`, there would be no room for what the turn
    /// makes, or its head cannot be read.
    pub async fn begin(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        let inner = &self.inner;
        let (held, row, head) = inner.hold(owner, id, if_match, wait).await?;
        let room = Arc::new(inner.admit(owner, inner.codec.most_bytes() as u64).await?);
        let (snapshot, tier) = inner.fetch(&super::version_id(&row.head)?, &head).await?;
        let session = inner.session(id.clone(), row, head)?;
        Ok(Turn { inner: Arc::clone(inner), owner, session, head: snapshot, tier, held, room })
    }

    /// Moves a session's head back, or forward again, to a version that it keeps.
    ///
    /// # Errors
    /// There is no such session or version, it is in use, its head is not `if_match`, or the disk fails.
    pub async fn rewind(
        &self,
        owner: Owner,
        id: &SessionId,
        to: &VersionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        let (inner, id, to) = (Arc::clone(&self.inner), id.clone(), to.clone());
        let (held, ..) = inner.hold(owner, &id, if_match, wait).await?;
        inner.ballast().await?;
        detached(async move {
            let name = id.clone();
            let moved = inner.writer.run(move |write| {
                let old = write.tables.own_session(owner, name.as_str())?;
                let place = write.tables.place(name.as_str(), to.as_str())?;
                place.ok_or(crate::session::index::Fault::Refused(StoreError::VERSION))?;
                let head = write.tables.known_version(to.as_str())?;
                let mut row = SessionRow { head: to.as_str().to_owned(), ..old.clone() };
                row.touch();
                write.put_session(name.as_str(), Some(&old), &row)?;
                Ok((row, head))
            });
            let (row, head) = moved.await?;
            drop(held);
            inner.session(id, row, head)
        })
        .await
    }
}

impl Inner {
    /// Takes the lease of a session, whose rows then hold until it is given back.
    async fn hold(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<(Held, SessionRow, VersionRow), StoreError> {
        self.live(owner, id).await?;
        let lease = self.leases.take(id, wait).await?;
        let held = Held { lease: Some(lease), uses: self.uses.clone(), id: id.clone() };
        let name = id.clone();
        let rows = self.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            Ok((tables.known_version(&row.head)?, row))
        });
        let (head, row) = rows.await?;
        if if_match.is_some_and(|expected| expected.as_str() != row.head) {
            return Err(StoreError::Stale { head: super::version_id(&row.head)? });
        }
        Ok((held, row, head))
    }
}

impl Turn {
    /// The session as the turn found it.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// What the turn goes on from.
    pub fn head(&self) -> &Arc<Snapshot> {
        &self.head
    }

    /// Where that was found.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Makes `snapshot` the session's head, under the name `version`, and keeps the receipt with it. Once this
    /// returns, the turn has happened; it goes on to its end when nobody waits for it any more.
    ///
    /// # Errors
    /// The session was deleted meanwhile, a quota or the disk is full, or the disk fails. Then nothing has changed.
    pub async fn commit(
        self,
        snapshot: Arc<Snapshot>,
        note: TurnNote,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
        version: VersionId,
    ) -> Result<Session, StoreError> {
        let ending = async move {
            let Self { inner, owner, session, held, room, .. } = self;
            let prepared = inner.prepare(owner, &version, &snapshot, Some(room)).await?;
            let (name, head, parent) = (session.id.clone(), version.clone(), session.head.id.clone());
            let (keep, lineage) = (inner.options.keep_versions, inner.options.lineage);
            let receipt_ends = now().saturating_add(inner.options.receipt_ttl.as_millis() as u64);
            let committed = inner.writer.run(move |write| {
                let old = write.tables.own_session(owner, name.as_str())?;
                let version = VersionRow {
                    parent: Some(parent.as_str().to_owned()),
                    label: note.label.clone(),
                    kind: note.kind.clone(),
                    prompt_tokens: note.prompt_tokens,
                    completion_tokens: note.completion_tokens,
                    ..prepared.row.clone()
                };
                let mut row = old.clone();
                row.touch();
                write.add_version(head.as_str(), &version)?;
                write.push_head(name.as_str(), &mut row, head.as_str(), keep, lineage)?;
                write.put_session(name.as_str(), Some(&old), &row)?;
                if let Some((ReceiptKey(key), answer)) = &receipt {
                    write.put_receipt(owner, key, receipt_ends, answer)?;
                }
                write.settle(prepared.reservation.as_ref());
                Ok((row, version))
            });
            let committed = match committed.await {
                Err(error) => inner.landed(owner, &session.id, &version, &error).await.ok_or(error),
                committed => committed,
            };
            match committed {
                Ok((row, head)) => {
                    if head.seed.is_none() {
                        inner.remember(&version, &snapshot);
                    }
                    count(&inner.counters.commits, 1);
                    drop(held);
                    inner.session(session.id, row, head)
                }
                Err(error) => Err(inner.abandon(&version, error).await),
            }
        };
        detached(ending).await
    }
}
