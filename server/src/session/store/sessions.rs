//! Creates, reads, changes and removes sessions.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::inner::{Inner, Store, detached, new_session, now};
use super::types::{Filter, Listing, NewSession, Page, Receipt, Session, Start};
use crate::session::conversation::Conversation;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Create, Edit, Edited, Forks, SessionRow, VersionRow};
use crate::session::patch::Patch;
use crate::session::snapshot::Snapshot;

/// The kind of a session's first version, if no turn created it.
const CREATED: &str = "create";

/// Maximum number of sessions that one list request reads, whatever its filter.
const MAX_EXAMINED: usize = 1000;

impl Store {
    /// Creates a session.
    ///
    /// # Errors
    /// The version to start from does not exist, a quota or the disk is full, or the disk fails.
    pub async fn create(&self, owner: Owner, new: NewSession) -> Result<Session, StoreError> {
        self.create_once(owner, new, None).await
    }

    /// Like [`Self::create`], and stores a receipt in the same transaction.
    ///
    /// # Errors
    /// Same as [`Self::create`].
    pub async fn create_once(
        &self,
        owner: Owner,
        new: NewSession,
        receipt: Option<Receipt<Session>>,
    ) -> Result<Session, StoreError> {
        let inner = Arc::clone(&self.inner);
        detached(async move { inner.create(owner, new, receipt, None).await }).await
    }

    /// Creates a session with this id, replacing the session that has it, if any. Waits at most `wait` while that
    /// session is in use.
    ///
    /// # Errors
    /// Same as [`Self::create`], or the session to replace is in use.
    pub async fn create_as(
        &self,
        owner: Owner,
        id: &SessionId,
        new: NewSession,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        let lease = inner.lease(&id, wait).await?;
        detached(async move {
            let created = inner.create(owner, new, None, Some((id.clone(), true))).await;
            drop(lease);
            inner.last_uses.forget(&id);
            created
        })
        .await
    }

    /// Returns the current description of a session.
    ///
    /// # Errors
    /// The session does not exist.
    pub async fn get(&self, owner: Owner, id: &SessionId) -> Result<Session, StoreError> {
        self.inner.live(owner, id).await?;
        // Also checked before the rows are read: a turn that ends after the read has a version that the rows do not
        // show.
        let was_in_use = self.inner.leases.in_use(id);
        let (row, head) = self.inner.index.head(owner, id).await?;
        let session = self.inner.session(id.clone(), row, head)?;
        Ok(Session { in_use: was_in_use || session.in_use, ..session })
    }

    /// Returns a page of an owner's sessions. The page is shorter than the limit if the request has examined as many
    /// sessions as it may.
    ///
    /// # Errors
    /// The session `after` does not exist.
    pub async fn list(&self, owner: Owner, listing: Listing) -> Result<Page, StoreError> {
        let Listing { after, limit, newest_first, filter } = listing;
        let mut after = match after {
            Some(after) => Some(self.inner.index.session(owner, &after).await?.number),
            None => None,
        };
        let (mut sessions, mut last, mut listed) = (Vec::new(), None, HashSet::new());
        let mut left = MAX_EXAMINED.max(limit);
        // One more than needed, to know whether there are more.
        let mut page = limit.saturating_add(1);
        loop {
            let found = self.inner.index.list(owner, after, newest_first, page).await?;
            let is_last = found.len() < page;
            for (id, (row, head)) in found {
                let allowed = !self.inner.is_expired(&id, &row) && filter.allows(&row, &head);
                if left == 0 || (allowed && sessions.len() == limit) {
                    return Ok(Page { sessions, next: last });
                }
                left -= 1;
                after = Some(row.number);
                // A session that is replaced during the listing shows up again among the newest.
                if allowed && listed.insert(id.clone()) {
                    sessions.push(self.inner.session(id.clone(), row, head)?);
                }
                last = Some(id);
            }
            if is_last {
                return Ok(Page { sessions, next: None });
            }
            page = page.saturating_mul(2).min(left + 1);
        }
    }

    /// Changes a session's metadata, its time to live, or the label of its head.
    ///
    /// # Errors
    /// The session does not exist, or the disk fails.
    pub async fn update(&self, owner: Owner, id: &SessionId, patch: Patch) -> Result<Session, StoreError> {
        let Edited { session, version } = self.inner.edit(owner, id, Edit::Patch(patch)).await?;
        self.inner.session(id.clone(), session, version.row)
    }

    /// Removes a session and every version that nothing else keeps. A turn that is running then fails to commit.
    ///
    /// # Errors
    /// The session does not exist, or the disk fails.
    pub async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        self.inner.live(owner, id).await?;
        self.inner.index.delete(owner, id).await?;
        self.inner.last_uses.forget(id);
        tracing::info!(session = %id, "session deleted");
        Ok(())
    }
}

impl Filter {
    /// Returns whether a session meets all conditions.
    fn allows(&self, row: &SessionRow, head: &VersionRow) -> bool {
        let within = |(after, before): (Option<u64>, Option<u64>), time: u64| {
            after.is_none_or(|after| time > after) && before.is_none_or(|before| time < before)
        };
        let source = row.forked_from.as_ref().map(|(session, _)| session);
        within(self.created, row.created)
            && within(self.updated, row.updated)
            && (self.label.is_none() || self.label == head.label)
            && self.metadata.iter().all(|(key, value)| row.metadata.get(key) == Some(value))
            && self.tag.as_ref().is_none_or(|tag| row.tags.contains_key(tag))
            && self.forked_from.as_ref().is_none_or(|session| source == Some(session))
    }
}

impl Inner {
    /// Returns the row of an owner's session, unless the session has expired.
    pub(super) async fn live(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let row = self.index.session(owner, id).await?;
        if self.is_expired(id, &row) { Err(StoreError::SESSION) } else { Ok(row) }
    }

    /// Like [`Self::live`], and records a use of the session.
    pub(super) async fn use_session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        let row = self.live(owner, id).await?;
        self.record_use(id, &row).await?;
        Ok(row)
    }

    /// Creates a session. If `named` has an id, the session gets that id, and the caller holds its lease; the flag says
    /// whether the session replaces an existing one with that id.
    pub(super) async fn create(
        self: &Arc<Self>,
        owner: Owner,
        new: NewSession,
        receipt: Option<Receipt<Session>>,
        named: Option<(SessionId, bool)>,
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
        self.check_reach()?;
        self.index.ready().await?;
        let replace = named.as_ref().is_some_and(|(_, replace)| *replace);
        let id = named.map_or_else(SessionId::new, |(id, _)| id);
        // Checked before an object is written, and again in the transaction.
        let max_sessions = self.options.owner_sessions;
        self.index
            .may_create(owner, Some(&id).filter(|_| replace), max_sessions)
            .await
            .inspect_err(|error| self.tally(error))?;
        let _room = match &receipt {
            Some(_) => Some(self.admit_receipt_of(owner, 1, &new.metadata).await?),
            None => None,
        };
        let text = self.prepare_text(owner, text.as_ref(), None).await?;
        let (mut added, mut upload) = (None, None);
        if let Some(snapshot) = &snapshot {
            let mut prepared = self.prepare(owner, &version, snapshot, None).await?;
            let (label, kind, session) = (new.label, CREATED.to_owned(), Some(id.as_str().to_owned()));
            prepared.version.row = VersionRow { label, kind, origin, session, ..prepared.version.row };
            prepared.version.add_text(text);
            (added, upload) = (Some(prepared.version), prepared.upload);
        }
        let mut row = SessionRow::new(owner, version.as_str(), new.ttl.map(|ttl| ttl.as_secs()), now());
        row.metadata = new.metadata;
        let receipt = receipt.map(|receipt| {
            self.receipt_of(receipt, |Forks { sessions, head }| {
                let (id, row) = &sessions[0];
                new_session(id, row, head)
            })
        });
        let create = Create { id: id.clone(), row, version: added, replace, max_sessions, receipt };
        let created = match self.index.create(create).await {
            Err(error) => self.find_created(owner, &id, Some(&version), &error).await.ok_or(error),
            created => created,
        };
        drop(upload);
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
