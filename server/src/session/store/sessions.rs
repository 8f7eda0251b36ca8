//! Creating, reading, changing and removing sessions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::inner::{Inner, Store, detached, new_session, now, session_id};
use super::types::{Filter, Listing, NewSession, Page, Patch, Receipt, ReceiptKey, Session, Start};
use crate::session::conversation::Conversation;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{IndexError, SessionRow, VersionRow, Write};
use crate::session::snapshot::Snapshot;

/// The kind of a session's first version, if no turn made it.
const CREATED: &str = "create";

/// Most sessions that one request for a page reads, whatever it looks for.
const MAX_EXAMINED: usize = 1000;

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
        detached(async move { inner.create(owner, new, receipt, None).await }).await
    }

    /// Creates a session with this id, in place of the one that has it. Waits at most `wait` while that is in use.
    ///
    /// # Errors
    /// As [`Self::create`], or the session in its place is in use.
    pub async fn create_as(
        &self,
        owner: Owner,
        id: &SessionId,
        new: NewSession,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        let lease = inner.leases.take(&id, wait).await?;
        detached(async move {
            let created = inner.create(owner, new, None, Some(id.clone())).await;
            inner.last_uses.forget(&id);
            drop(lease);
            created
        })
        .await
    }

    /// The current description of a session.
    ///
    /// # Errors
    /// No such session.
    pub async fn get(&self, owner: Owner, id: &SessionId) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        // Asked before as well: a turn that ends after the rows were read has a version that they do not show.
        let was_in_use = self.inner.leases.in_use(id);
        let name = id.clone();
        let rows = self.inner.read(move |tables| {
            let row = tables.own_session(owner, name.as_str())?;
            Ok((tables.require_version(&row.head)?, row))
        });
        let (head, row) = rows.await?;
        let session = self.inner.session(id.clone(), row, head)?;
        Ok(Session { in_use: was_in_use || session.in_use, ..session })
    }

    /// A page of an owner's sessions. It has fewer than the limit if it examined as many sessions as a request may.
    ///
    /// # Errors
    /// No such session as `after`.
    pub async fn list(&self, owner: Owner, listing: Listing) -> Result<Page, StoreError> {
        let inner = Arc::clone(&self.inner);
        let found = self.inner.read(move |tables| {
            let Listing { after, limit, newest_first, filter } = &listing;
            let after = after.as_ref().map(|after| tables.own_session(owner, after.as_str())).transpose()?;
            let (mut found, mut last, mut examined, mut more) = (Vec::new(), None, 0, false);
            tables.visit_sessions(owner, after.map(|row| row.number), *newest_first, |name, row| {
                more = examined >= MAX_EXAMINED.max(*limit);
                if more {
                    return Ok(false);
                }
                examined += 1;
                let id = session_id(name).map_err(IndexError::Refused)?;
                if !inner.is_expired(&id, &row) && filter.allows(&row) {
                    match tables.require_version(&row.head) {
                        Ok(head) if filter.label.is_none() || filter.label == head.label => {
                            more = found.len() == *limit;
                            if more {
                                return Ok(false);
                            }
                            found.push((head, id.clone(), row));
                        }
                        Err(IndexError::Row(reason)) => {
                            tracing::error!(session = name, reason, "a damaged row: the session is not listed");
                        }
                        head => drop(head?),
                    }
                }
                last = Some(id);
                Ok(true)
            })?;
            Ok((found, last.filter(|_| more)))
        });
        let (found, next) = found.await?;
        let sessions = found.into_iter().map(|(head, id, row)| self.inner.session(id, row, head));
        Ok(Page { sessions: sessions.collect::<Result<_, _>>()?, next })
    }

    /// Changes a session's metadata, its time to live, or the label of its head.
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
            let mut head = write.tables.require_version(&old.head)?;
            let mut row = old.clone();
            if let Some(label) = &patch.label {
                head.label.clone_from(label);
                write.add_version(&old.head, &head)?;
            }
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
        tracing::info!(session = %id, "session deleted");
        Ok(())
    }
}

impl Filter {
    /// Whether a session may be listed, as far as its row says.
    fn allows(&self, row: &SessionRow) -> bool {
        let within = |(after, before): (Option<u64>, Option<u64>), time: u64| {
            after.is_none_or(|after| time > after) && before.is_none_or(|before| time < before)
        };
        let source = row.forked_from.as_ref().map(|(session, _)| session);
        within(self.created, row.created)
            && within(self.updated, row.updated)
            && self.metadata.iter().all(|(key, value)| row.metadata.get(key) == Some(value))
            && self.tag.as_ref().is_none_or(|tag| row.tags.contains_key(tag))
            && self.forked_from.as_ref().is_none_or(|session| source == Some(session))
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
            tags: BTreeMap::new(),
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

    /// Creates a session, with the id `replaced` and in place of the one that has it, if that is given. The caller holds its
    /// lease.
    pub(super) async fn create(
        self: &Arc<Self>,
        owner: Owner,
        new: NewSession,
        receipt: Option<Receipt<Session>>,
        replaced: Option<SessionId>,
    ) -> Result<Session, StoreError> {
        let (mut origin, is_uploaded) = (Vec::new(), matches!(new.start, Start::Uploaded(..)));
        let (version, snapshot, text) = match new.start {
            Start::Empty { seed } => (VersionId::new(), Some(Arc::new(Snapshot::empty(seed))), None),
            Start::Snapshot(snapshot) => (VersionId::new(), Some(snapshot), None),
            Start::Read(snapshot, text) => (VersionId::new(), Some(snapshot), Some(text)),
            Start::Uploaded(snapshot, Conversation { lineage, text, .. }) => {
                origin = lineage;
                (VersionId::new(), Some(snapshot), text)
            }
            Start::Version(version) => (version, None, None),
        };
        self.ensure_ballast().await?;
        // Checked before an object is written, and again in the transaction.
        let max_sessions = self.options.owner_sessions;
        let check = move |write: &Write<'_>, replaced: Option<&SessionId>| -> Result<Option<SessionRow>, IndexError> {
            let old = replaced.map(|id| existing(write, owner, id)).transpose()?.flatten();
            write.check_session_quota(owner, usize::from(old.is_none()), max_sessions)?;
            Ok(old)
        };
        let checked = replaced.clone();
        self.writer
            .read(move |write| check(write, checked.as_ref()).map(drop))
            .await
            .inspect_err(|error| self.tally(error))?;
        let _room = match &receipt {
            Some(_) => Some(self.admit_receipt_of(owner, 1, &new.metadata).await?),
            None => None,
        };
        let text = self.prepare_text(owner, text.as_ref(), None).await?;
        let prepared = match &snapshot {
            Some(snapshot) => Some(self.prepare(owner, &version, snapshot, None).await?),
            None => None,
        };
        let id = replaced.clone().unwrap_or_else(SessionId::new);
        let mut row = SessionRow::new(owner, version.as_str(), new.ttl);
        row.metadata = new.metadata;
        let (name, head) = (id.clone(), version.clone());
        let receipt_expiry = self.receipt_expiry();
        let created = self.writer.run(move |write| {
            let old = check(write, replaced.as_ref())?;
            match &prepared {
                Some(prepared) => {
                    let label = new.label.clone();
                    let (kind, session) = (CREATED.to_owned(), Some(name.as_str().to_owned()));
                    let row = VersionRow { label, kind, session, origin: origin.clone(), ..prepared.row.clone() };
                    write.add_version(head.as_str(), &row)?;
                    if let Some(text) = &text {
                        text.add(write, owner, head.as_str(), None)?;
                    }
                    write.fulfil(prepared.reservation.as_ref());
                }
                None => drop(write.tables.kept_version(owner, head.as_str())?),
            }
            write.point(head.as_str(), 1, 1)?;
            // After the new one points to its version, which the old one may be the only one to keep.
            if let Some(old) = &old {
                write.remove_session(name.as_str(), old)?;
            }
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
                let event = if is_uploaded { "session uploaded" } else { "session created" };
                tracing::info!(session = %id, version = %version, "{event}");
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

/// The row of an owner's session, if there is one.
fn existing(write: &Write<'_>, owner: Owner, id: &SessionId) -> Result<Option<SessionRow>, IndexError> {
    match write.tables.own_session(owner, id.as_str()) {
        Err(IndexError::Refused(StoreError::NotFound { .. })) => Ok(None),
        row => row.map(Some),
    }
}
