//! Turns: transactions that move a session's head.

use std::sync::Arc;
use std::time::Duration;

use super::inner::{Inner, LastUses, Store, count, detached, version_id};
use super::types::{ReceiptKey, Session, Tier, TurnNote};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{IndexError, Reservation, SessionRow, VersionRow};
use crate::session::lease::Lease;
use crate::session::snapshot::Snapshot;

/// A session in use. Dropping it releases the session unchanged.
pub struct Turn {
    inner: Arc<Inner>,
    owner: Owner,
    session: Session,
    head: Arc<Snapshot>,
    tier: Tier,
    lease: RecordedLease,
    /// Space for the new version, enough for the largest possible one.
    reserved: Arc<Reservation>,
}

/// A session's lease, which records the session's last use when it is released.
struct RecordedLease {
    lease: Option<Lease>,
    last_uses: LastUses,
    id: SessionId,
}

impl Drop for RecordedLease {
    fn drop(&mut self) {
        // Recorded first, so that a session never looks both unused and free.
        self.last_uses.record(&self.id);
        self.lease = None;
    }
}

impl Store {
    /// Takes a session for a turn, waiting at most `wait` while it is in use. Waiters are served in order.
    ///
    /// # Errors
    /// No such session, it is in use, its head is not `if_match`, there is no space for the turn's result, or its head
    /// cannot be read.
    pub async fn begin(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        let inner = &self.inner;
        let (lease, row, head) = inner.hold(owner, id, if_match, wait).await?;
        let reserved = Arc::new(inner.admit(owner, inner.codec.max_bytes() as u64).await?);
        let (snapshot, tier) = inner.fetch(&version_id(&row.head)?, &head).await?;
        let session = inner.session(id.clone(), row, head)?;
        Ok(Turn { inner: Arc::clone(inner), owner, session, head: snapshot, tier, lease, reserved })
    }

    /// Moves a session's head to another version that it keeps.
    ///
    /// # Errors
    /// No such session or version, it is in use, its head is not `if_match`, or the disk fails.
    pub async fn rewind(
        &self,
        owner: Owner,
        id: &SessionId,
        to: &VersionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        let (inner, id, to) = (Arc::clone(&self.inner), id.clone(), to.clone());
        let (lease, ..) = inner.hold(owner, &id, if_match, wait).await?;
        inner.ensure_ballast().await?;
        detached(async move {
            let name = id.clone();
            let moved = inner.writer.run(move |write| {
                let old = write.tables.own_session(owner, name.as_str())?;
                let position = write.tables.position(name.as_str(), to.as_str())?;
                position.ok_or(IndexError::Refused(StoreError::VERSION))?;
                let head = write.tables.require_version(to.as_str())?;
                let mut row = SessionRow { head: to.as_str().to_owned(), ..old.clone() };
                row.touch();
                write.put_session(name.as_str(), Some(&old), &row)?;
                Ok((row, head))
            });
            let (row, head) = moved.await?;
            drop(lease);
            inner.session(id, row, head)
        })
        .await
    }
}

impl Inner {
    /// Takes a session's lease and reads its rows, which nobody else can then change.
    async fn hold(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<(RecordedLease, SessionRow, VersionRow), StoreError> {
        self.live(owner, id).await?;
        let lease = self.leases.take(id, wait).await?;
        let lease = RecordedLease { lease: Some(lease), last_uses: self.last_uses.clone(), id: id.clone() };
        let name = id.clone();
        let rows = self.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            Ok((tables.require_version(&row.head)?, row))
        });
        let (head, row) = rows.await?;
        if if_match.is_some_and(|expected| expected.as_str() != row.head) {
            return Err(StoreError::Stale { head: version_id(&row.head)? });
        }
        Ok((lease, row, head))
    }
}

impl Turn {
    /// The session at the start of the turn.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The snapshot from which the turn starts.
    pub fn head(&self) -> &Arc<Snapshot> {
        &self.head
    }

    /// Where that snapshot was found.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Makes `snapshot` the session's head, as `version`, and stores the receipt in the same transaction. When this
    /// returns, the turn is committed. The commit completes even if the caller goes away.
    ///
    /// # Errors
    /// The session was deleted meanwhile, a quota or the disk is full, or the disk fails. Nothing has changed then.
    pub async fn commit(
        self,
        snapshot: Arc<Snapshot>,
        note: TurnNote,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
        version: VersionId,
    ) -> Result<Session, StoreError> {
        let commit = async move {
            let Self { inner, owner, session, lease, reserved, .. } = self;
            let prepared = inner.prepare(owner, &version, &snapshot, Some(reserved)).await?;
            let (name, head, parent) = (session.id.clone(), version.clone(), session.head.id.clone());
            let (keep, lineage) = (inner.options.keep_versions, inner.options.lineage);
            let receipt_expiry = inner.receipt_expiry();
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
                    write.put_receipt(owner, key, receipt_expiry, answer)?;
                }
                write.fulfil(prepared.reservation.as_ref());
                Ok((row, version))
            });
            let committed = match committed.await {
                Err(error) => inner.find_commit(owner, &session.id, &version, &error).await.ok_or(error),
                committed => committed,
            };
            match committed {
                Ok((row, head)) => {
                    if head.seed.is_none() {
                        inner.remember(&version, &snapshot);
                    }
                    count(&inner.counters.commits, 1);
                    drop(lease);
                    inner.session(session.id, row, head)
                }
                Err(error) => Err(inner.abandon(&version, error).await),
            }
        };
        detached(commit).await
    }
}
