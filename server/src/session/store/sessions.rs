//! Creating, reading, changing and removing sessions.

use std::sync::Arc;
use std::time::Duration;

use super::inner::{Inner, Store, detached, new_session, now, session_id};
use super::types::{NewSession, Patch, Receipt, ReceiptKey, Session, Start};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{IndexError, SessionRow, VersionRow};
use crate::session::snapshot::Snapshot;

/// The kind of a session's first version, if no turn made it.
const CREATED: &str = "create";

impl Store {
    /// Creates a session.
    ///
    /// # Errors
    /// The version to start from does not exist, a quota or the disk is full, or the disk fails.
    pub async fn create(&self, owner: Owner, new: NewSession) -> Result<Session, StoreError> {
        self.create_once(owner, new, None).await
    }

    /// As [`Self::create`], and stores a receipt in the same transaction.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub async fn create_once(
        &self,
        owner: Owner,
        new: NewSession,
        receipt: Option<Receipt<Session>>,
    ) -> Result<Session, StoreError> {
        let inner = Arc::clone(&self.inner);
        detached(async move { inner.create(owner, new, receipt).await }).await
    }

    /// The current description of a session.
    ///
    /// # Errors
    /// No such session.
    pub async fn get(&self, owner: Owner, id: &SessionId) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        let name = id.clone();
        let rows = self.inner.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            Ok((tables.require_version(&row.head)?, row))
        });
        let (head, row) = rows.await?;
        self.inner.session(id.clone(), row, head)
    }

    /// An owner's sessions in order of creation, starting after `after`, and whether there are more.
    ///
    /// # Errors
    /// No such session as `after`.
    pub async fn list(
        &self,
        owner: Owner,
        after: Option<SessionId>,
        limit: usize,
        newest_first: bool,
    ) -> Result<(Vec<Session>, bool), StoreError> {
        let inner = Arc::clone(&self.inner);
        let found = self.inner.read(move |tables| {
            let after = after.as_ref().map(|after| tables.own_session(owner, after.as_str())).transpose()?;
            let (mut found, mut more) = (Vec::new(), false);
            tables.visit_sessions(owner, after.map(|row| row.number), newest_first, |name, row| {
                let id = session_id(name).map_err(IndexError::Refused)?;
                if inner.is_expired(&id, &row) {
                    return Ok(true);
                }
                more = found.len() == limit;
                if !more {
                    found.push((tables.require_version(&row.head)?, id, row));
                }
                Ok(!more)
            })?;
            Ok((found, more))
        });
        let (found, more) = found.await?;
        let sessions = found.into_iter().map(|(head, id, row)| self.inner.session(id, row, head));
        Ok((sessions.collect::<Result<_, _>>()?, more))
    }

    /// Changes a session's metadata or time to live.
    ///
    /// # Errors
    /// There is no such session, or the disk fails.
    pub async fn update(&self, owner: Owner, id: &SessionId, patch: Patch) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.ensure_ballast().await?;
        self.inner.last_uses.record(id);
        let name = id.clone();
        let rows = self.inner.writer.run(move |write| {
            let old = write.tables.own_session(owner, name.as_str())?;
            let head = write.tables.require_version(&old.head)?;
            let mut row = old.clone();
            if let Some(metadata) = &patch.metadata {
                row.metadata.clone_from(metadata);
            }
            if let Some(ttl) = patch.ttl {
                row.ttl = ttl.map(|ttl| ttl.as_secs());
            }
            row.touch();
            write.put_session(name.as_str(), Some(&old), &row)?;
            Ok((head, row))
        });
        let (head, row) = rows.await?;
        self.inner.session(id.clone(), row, head)
    }

    /// Removes a session and every version that nothing else keeps. A running turn then fails to commit.
    ///
    /// # Errors
    /// There is no such session, or the disk fails.
    pub async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        self.inner.live(owner, id).await?;
        let name = id.clone();
        let removed = self.inner.run_freeing(move |write| {
            let row = write.tables.own_session(owner, name.as_str())?;
            write.remove_session(name.as_str(), &row)
        });
        removed.await?;
        self.inner.last_uses.forget(id);
        Ok(())
    }
}

impl SessionRow {
    /// Records a change, which is also a use.
    pub(super) fn touch(&mut self) {
        self.used = self.used.max(now());
        self.updated = now() / 1000;
    }

    /// A row for a new session. [`Write::add_session`] fills in the counts.
    pub(super) fn new(owner: Owner, head: &str, ttl: Option<Duration>) -> Self {
        Self {
            owner,
            number: 0,
            created: now() / 1000,
            updated: now() / 1000,
            used: now(),
            ttl: ttl.map(|ttl| ttl.as_secs()),
            head: head.to_owned(),
            metadata: super::Metadata::new(),
            forked_from: None,
            next: 0,
            kept: 0,
            known: 0,
        }
    }
}

impl Inner {
    /// The row of an owner's session, unless it has expired.
    pub(super) async fn live(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let name = id.clone();
        let row = self.read(move |tables| tables.own_session(owner, name.as_str())).await?;
        if self.is_expired(id, &row) { Err(StoreError::SESSION) } else { Ok(row) }
    }

    async fn create(
        self: &Arc<Self>,
        owner: Owner,
        new: NewSession,
        receipt: Option<Receipt<Session>>,
    ) -> Result<Session, StoreError> {
        let (version, snapshot) = match new.start {
            Start::Empty { seed } => (VersionId::new(), Some(Arc::new(Snapshot::empty(seed)))),
            Start::Snapshot(snapshot) => (VersionId::new(), Some(snapshot)),
            Start::Version(version) => (version, None),
        };
        self.ensure_ballast().await?;
        // Checked before an object is written, and again in the transaction.
        let max_sessions = self.options.owner_sessions;
        self.writer
            .read(move |write| write.check_session_quota(owner, 1, max_sessions))
            .await
            .inspect_err(|error| self.tally(error))?;
        let prepared = match &snapshot {
            Some(snapshot) => Some(self.prepare(owner, &version, snapshot, None).await?),
            None => None,
        };
        let id = SessionId::new();
        let mut row = SessionRow::new(owner, version.as_str(), new.ttl);
        row.metadata = new.metadata;
        let (name, head) = (id.clone(), version.clone());
        let receipt_expiry = self.receipt_expiry();
        let created = self.writer.run(move |write| {
            write.check_session_quota(owner, 1, max_sessions)?;
            match &prepared {
                Some(prepared) => {
                    let label = new.label.clone();
                    let row = VersionRow { label, kind: CREATED.to_owned(), ..prepared.row.clone() };
                    write.add_version(head.as_str(), &row)?;
                    write.fulfil(prepared.reservation.as_ref());
                }
                None => drop(write.tables.kept_version(owner, head.as_str())?),
            }
            write.point(head.as_str(), 1, 1)?;
            let row = write.add_session(name.as_str(), row.clone(), &[(head.as_str(), true)])?;
            let head = write.tables.require_version(head.as_str())?;
            if let Some((ReceiptKey(key), answer)) = &receipt {
                let answer = answer(&new_session(&name, &row, &head).map_err(IndexError::Refused)?);
                write.put_receipt(owner, key, receipt_expiry, &answer)?;
            }
            Ok((row, head))
        });
        let created = match created.await {
            Err(error) => self.find_commit(owner, &id, &version, &error).await.ok_or(error),
            created => created,
        };
        match created {
            Ok((row, head)) => {
                if let Some(snapshot) = snapshot.filter(|_| head.seed.is_none()) {
                    self.remember(&version, &snapshot);
                }
                new_session(&id, &row, &head)
            }
            Err(error) if snapshot.is_some() => {
                self.tally(&error);
                Err(self.abandon(&version, error).await)
            }
            Err(error) => Err(error),
        }
    }
}
