//! Sessions: made, looked at, changed and removed.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Inner, NewSession, Patch, Receipt, ReceiptKey, Session, Start, Store, detached, new_session, now, seconds,
};
use crate::session::index::{Fault, SessionRow, VersionRow};
use crate::session::{Owner, SessionId, Snapshot, StoreError, VersionId};

/// What the first version of a session that begins without a turn is called.
const CREATED: &str = "create";

impl Store {
    /// Makes a session.
    ///
    /// # Errors
    /// The version that it is to begin with is not there, a quota or the disk is full, or the disk fails.
    pub async fn create(&self, owner: Owner, new: NewSession) -> Result<Session, StoreError> {
        self.create_once(owner, new, None).await
    }

    /// As [`Self::create`], and keeps the receipt with the session.
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

    /// A session as it is now.
    ///
    /// # Errors
    /// There is no such session.
    pub async fn get(&self, owner: Owner, id: &SessionId) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        let name = id.clone();
        let rows = self.inner.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            Ok((tables.known_version(&row.head)?, row))
        });
        let (head, row) = rows.await?;
        self.inner.session(id.clone(), row, head)
    }

    /// An owner's sessions in the order of their creation, from the first after `after`, and whether there are more.
    ///
    /// # Errors
    /// `after` is not there.
    pub async fn list(
        &self,
        owner: Owner,
        after: Option<SessionId>,
        limit: usize,
        newest_first: bool,
    ) -> Result<(Vec<Session>, bool), StoreError> {
        let inner = Arc::clone(&self.inner);
        let found = self.inner.read(move |tables| {
            let after = match &after {
                Some(after) => Some(tables.own_session(owner, after.as_str())?.number),
                None => None,
            };
            let (first, last) = match (after, newest_first) {
                (None, _) => (0, u64::MAX),
                (Some(after), false) => (after + 1, u64::MAX),
                (Some(0), true) => return Ok((Vec::new(), false)),
                (Some(after), true) => (0, after - 1),
            };
            let mut found = Vec::new();
            let mut entries = tables.created.range((&owner.0, first)..=(&owner.0, last))?;
            while let Some(entry) = if newest_first { entries.next_back() } else { entries.next() } {
                let name = entry?.1.value().to_owned();
                let id = super::session_id(&name).map_err(Fault::Refused)?;
                let row = tables.own_session(owner, &name)?;
                if inner.over(&id, &row) {
                    continue;
                }
                if found.len() == limit {
                    return Ok((found, true));
                }
                found.push((tables.known_version(&row.head)?, id, row));
            }
            Ok((found, false))
        });
        let (found, more) = found.await?;
        let sessions = found.into_iter().map(|(head, id, row)| self.inner.session(id, row, head));
        Ok((sessions.collect::<Result<_, _>>()?, more))
    }

    /// Changes what the client wrote to a session, or how long it is kept.
    ///
    /// # Errors
    /// There is no such session, or the disk fails.
    pub async fn update(&self, owner: Owner, id: &SessionId, patch: Patch) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.ballast().await?;
        self.inner.uses.note(id);
        let name = id.clone();
        let rows = self.inner.writer.run(move |write| {
            let old = write.tables.own_session(owner, name.as_str())?;
            let head = write.tables.known_version(&old.head)?;
            let mut row = old.clone();
            if let Some(metadata) = &patch.metadata {
                row.metadata.clone_from(metadata);
            }
            if let Some(ttl) = patch.ttl {
                row.ttl = ttl.map(seconds);
            }
            row.touch();
            write.put_session(name.as_str(), Some(&old), &row)?;
            Ok((head, row))
        });
        let (head, row) = rows.await?;
        self.inner.session(id.clone(), row, head)
    }

    /// Removes a session, and every version that nothing else keeps. A turn that is running comes to nothing.
    ///
    /// # Errors
    /// There is no such session, or the disk fails.
    pub async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        self.inner.live(owner, id).await?;
        let name = id.clone();
        let removed = self.inner.free(move |write| {
            let row = write.tables.own_session(owner, name.as_str())?;
            write.remove_session(name.as_str(), &row)
        });
        removed.await?;
        self.inner.uses.forget(id);
        Ok(())
    }
}

impl SessionRow {
    /// It was changed, and so used, now.
    pub(super) fn touch(&mut self) {
        self.used = self.used.max(now());
        self.updated = now() / 1000;
    }

    /// A row before its session is written: the counts follow from its versions.
    pub(super) fn new(owner: Owner, head: &str, ttl: Option<Duration>) -> Self {
        Self {
            owner,
            number: 0,
            created: now() / 1000,
            updated: now() / 1000,
            used: now(),
            ttl: ttl.map(seconds),
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
    /// The row of an owner's session whose time is not over.
    pub(super) async fn live(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let name = id.clone();
        let row = self.read(move |tables| tables.own_session(owner, name.as_str())).await?;
        if self.over(id, &row) { Err(StoreError::SESSION) } else { Ok(row) }
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
        self.ballast().await?;
        // Before anything is written, and again with it.
        let most = self.options.owner_sessions;
        self.writer
            .look(move |write| write.room_for_sessions(owner, 1, most))
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
        let receipt_ends = now().saturating_add(self.options.receipt_ttl.as_millis() as u64);
        let made = self.writer.run(move |write| {
            write.room_for_sessions(owner, 1, most)?;
            match &prepared {
                Some(prepared) => {
                    let label = new.label.clone();
                    let row = VersionRow { label, kind: CREATED.to_owned(), ..prepared.row.clone() };
                    write.add_version(head.as_str(), &row)?;
                    write.settle(prepared.reservation.as_ref());
                }
                None => drop(write.tables.kept_version(owner, head.as_str())?),
            }
            write.point(head.as_str(), 1, 1)?;
            let row = write.add_session(name.as_str(), row.clone(), &[(head.as_str(), true)])?;
            let about = write.tables.known_version(head.as_str())?;
            if let Some((ReceiptKey(key), answer)) = &receipt {
                let answer = answer(&new_session(&name, &row, &about).map_err(Fault::Refused)?);
                write.put_receipt(owner, key, receipt_ends, &answer)?;
            }
            Ok((row, about))
        });
        let made = match made.await {
            Err(error) => self.landed(owner, &id, &version, &error).await.ok_or(error),
            made => made,
        };
        match made {
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
