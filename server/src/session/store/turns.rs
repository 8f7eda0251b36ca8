//! Turns: transactions that move a session's head.

mod again;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::held::Held;
use super::inner::{Inner, Store, count, detached, now, version_id};
use super::load::Prepared;
use super::turn_forks::{TurnFork, TurnForks};
use super::types::{NewSession, ReceiptKey, Session, Start, Tier, TurnNote, Version};
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Commit, Reservation, Rewind, SessionRow, VersionRow, most_bytes, text_bytes};
use crate::session::patch::Metadata;
use crate::session::snapshot::Snapshot;

pub use again::Restart;

/// A session in use. Dropping it releases the session unchanged.
pub struct Turn {
    inner: Arc<Inner>,
    owner: Owner,
    session: Session,
    /// What is needed to create the session, if it does not exist yet.
    absent: Option<Absent>,
    head: Arc<Snapshot>,
    tier: Tier,
    expectation: Expectation,
    lease: Held,
    /// Space reserved for the new version, enough for the largest possible one.
    reserved: Arc<Reservation>,
    /// Space reserved for the text that the turn adds.
    text_reserved: Option<Arc<Reservation>>,
    forks: TurnForks,
    /// Whether another server may run the same turn, and commit the same version.
    repeats: bool,
}

/// What is needed to create a session that does not exist yet.
struct Absent {
    new: NewSession,
    /// Whether it replaces a session that has expired.
    replaces: bool,
}

/// What a turn starts from.
struct Origin {
    session: Session,
    absent: Option<Absent>,
    head: Arc<Snapshot>,
    tier: Tier,
}

/// What a request expects of its session's head until the request ends.
#[derive(Clone, Copy, Debug)]
struct Expectation {
    /// Whether the client named the head.
    named: bool,
    /// How many times the index had been opened when the head was read.
    opened: u64,
}

impl Expectation {
    /// Returns the error for a request that was refused because the head is another version.
    fn refusal(self, error: StoreError) -> StoreError {
        match error {
            StoreError::Stale { head } if !self.named => StoreError::Conflict { head },
            error => error,
        }
    }
}

impl Store {
    /// Takes a session for a turn, waiting at most `wait` while it is in use. Waiters are served in order.
    ///
    /// # Errors
    /// The session does not exist or is in use, its head is not `if_match` or cannot be read, or there is no space for
    /// the turn's result.
    pub async fn begin(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        let inner = &self.inner;
        inner.check_reach()?;
        let (lease, expectation, row, head) = inner.hold(owner, id, if_match, wait).await?;
        let reserved = Arc::new(inner.admit(owner, inner.codec.max_bytes() as u64).await?);
        let (snapshot, tier) = inner.fetch(&version_id(&row.head)?, &head).await?;
        let session = inner.session(id.clone(), row, head)?;
        let origin = Origin { session, absent: None, head: snapshot, tier };
        Ok(Turn::new(inner, owner, origin, (lease, expectation, reserved)))
    }

    /// Like [`Self::begin`]. If there is no session with this id, the turn starts from an empty session, which
    /// [`Turn::create_session`] creates with this metadata; the lease keeps others from using the id until the turn
    /// ends.
    ///
    /// # Errors
    /// The session is in use, there is no space for the turn's result, or the head cannot be read.
    pub async fn begin_or_create(
        &self,
        owner: Owner,
        id: &SessionId,
        (seed, metadata): (u64, Metadata),
        wait: Duration,
    ) -> Result<Turn, StoreError> {
        let inner = &self.inner;
        inner.check_reach()?;
        let mut lease = inner.lease(id, wait).await?;
        let expectation = Expectation { named: false, opened: inner.index.opened() };
        let found = match inner.index.head(owner, id).await {
            Ok(found) => Some(found),
            Err(StoreError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let replaces = found.is_some();
        let (session, absent, head) = if let Some((row, head)) = found.filter(|(row, _)| !inner.has_ended(id, row)) {
            inner.begun(&mut lease, &row).await?;
            (inner.session(id.clone(), row, head.clone())?, None, Some(head))
        } else {
            let session = absent_session(id, &metadata);
            let new = NewSession { start: Start::Empty { seed }, metadata, ttl: None, label: None };
            (session, Some(Absent { new, replaces }), None)
        };
        let reserved = Arc::new(inner.admit(owner, inner.codec.max_bytes() as u64).await?);
        let (head, tier) = match head {
            Some(head) => inner.fetch(&session.head.id, &head).await?,
            None => (Arc::new(Snapshot::empty(seed)), Tier::Memory),
        };
        let origin = Origin { session, absent, head, tier };
        Ok(Turn::new(inner, owner, origin, (lease, expectation, reserved)))
    }

    /// Moves a session's head to another version of the same owner whose snapshot is kept. The session then lists that
    /// version and its ancestors.
    ///
    /// # Errors
    /// The session or version does not exist, the session is in use, its head is not `if_match`, another server has
    /// moved the head, or the disk fails.
    pub async fn rewind(
        &self,
        owner: Owner,
        id: &SessionId,
        to: &VersionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<Session, StoreError> {
        let (inner, id, to) = (Arc::clone(&self.inner), id.clone(), to.clone());
        let (lease, expectation, row, _) = inner.hold(owner, &id, if_match, wait).await?;
        inner.index.ready().await?;
        detached(async move {
            let (session, bounds, expected) = (id.clone(), inner.bounds(), version_id(&row.head)?);
            let rewind = Rewind { owner, session, expected, to, bounds, now: now() };
            let moved = inner.moved(&rewind).await.inspect_err(|error| inner.count_conflict(error));
            let (row, head) = moved.map_err(|error| expectation.refusal(error))?;
            drop(lease);
            inner.session(id, row, head)
        })
        .await
    }
}

/// Describes a session that does not exist yet.
fn absent_session(id: &SessionId, metadata: &Metadata) -> Session {
    let head = Version {
        id: VersionId::new(),
        parent: None,
        tokens: 0,
        time: now(),
        label: None,
        kind: String::new(),
        prompt_tokens: 0,
        completion_tokens: 0,
        bytes: 0,
        kept: false,
        session: None,
        tags: Vec::new(),
    };
    Session {
        id: id.clone(),
        head,
        metadata: metadata.clone(),
        created: now() / 1000,
        updated: now() / 1000,
        expires: None,
        ttl: None,
        in_use: true,
        forked_from: None,
        tags: BTreeMap::new(),
    }
}

impl Inner {
    /// Takes a session's lease and reads its rows, which no other request of this server changes while the lease is
    /// held.
    async fn hold(
        &self,
        owner: Owner,
        id: &SessionId,
        if_match: Option<VersionId>,
        wait: Duration,
    ) -> Result<(Held, Expectation, SessionRow, VersionRow), StoreError> {
        self.live(owner, id).await?;
        let mut lease = self.lease(id, wait).await?;
        let expectation = Expectation { named: if_match.is_some(), opened: self.index.opened() };
        let (row, head) = self.index.head(owner, id).await?;
        if if_match.is_some_and(|expected| expected.as_str() != row.head) {
            return Err(StoreError::Stale { head: version_id(&row.head)? });
        }
        self.begun(&mut lease, &row).await?;
        Ok((lease, expectation, row, head))
    }

    /// Counts an error as a conflict if another server moved the head first.
    fn count_conflict(&self, error: &StoreError) {
        if matches!(error, StoreError::Stale { .. }) {
            count(&self.counters.conflicts, 1);
        }
    }
}

impl Turn {
    fn new(
        inner: &Arc<Inner>,
        owner: Owner,
        origin: Origin,
        (lease, expectation, reserved): (Held, Expectation, Arc<Reservation>),
    ) -> Self {
        let (inner, Origin { session, absent, head, tier }) = (Arc::clone(inner), origin);
        let (text_reserved, forks, repeats) = (None, TurnForks::default(), false);
        Self { inner, owner, session, absent, head, tier, expectation, lease, reserved, text_reserved, forks, repeats }
    }

    /// Returns the session at the start of the turn.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the snapshot from which the turn starts.
    pub fn head(&self) -> &Arc<Snapshot> {
        &self.head
    }

    /// Creates the session, if it does not exist yet.
    ///
    /// # Errors
    /// The owner may not have another session, or the disk is full or fails.
    pub async fn create_session(&mut self) -> Result<(), StoreError> {
        let Some(Absent { new, replaces }) = self.absent.take() else { return Ok(()) };
        let (inner, owner, id) = (Arc::clone(&self.inner), self.owner, self.session.id.clone());
        let created = async move {
            let created = inner.create(owner, new, None, Some((id.clone(), replaces))).await;
            match created {
                // Another server has created it in the meantime.
                Err(StoreError::NotFound { .. }) if !replaces => match inner.index.session(owner, &id).await {
                    Ok(row) => Err(StoreError::Conflict { head: version_id(&row.head)? }),
                    Err(_) => created,
                },
                created => created,
            }
        };
        self.session = detached(created).await?;
        Ok(())
    }

    /// Returns where the snapshot of [`Self::head`] was found.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Reserves space for the largest possible snapshots of `n` forks. Call this before anything is computed for them.
    ///
    /// # Errors
    /// The owner may not have that many sessions, the session has too many versions for that many forks, or there is no
    /// space.
    pub async fn reserve_forks(&mut self, n: usize) -> Result<(), StoreError> {
        let from = (self.session.id.clone(), self.session.head.id.clone());
        self.forks.reserve(&self.inner, self.owner, from, n).await
    }

    /// Reserves space for the text that the turn will add, if texts are kept: `tokens` tokens with ids below
    /// `vocab_size`, and `messages` bytes of messages.
    ///
    /// # Errors
    /// A quota or the disk is full and nothing can be evicted, or the disk fails.
    pub async fn reserve_text(&mut self, tokens: u64, vocab_size: u64, messages: u64) -> Result<(), StoreError> {
        if self.inner.options.keep_text {
            let bytes = text_bytes(most_bytes(tokens, vocab_size, messages));
            self.text_reserved = Some(Arc::new(self.inner.admit(self.owner, bytes).await?));
        }
        Ok(())
    }

    /// Sets the forks that the commit creates.
    pub fn leave_forks(&mut self, forks: Vec<TurnFork>) {
        self.forks.leave(forks);
    }

    /// Commits the turn: makes `snapshot` the session's head, as `version`, and in the same transaction creates the
    /// forks and stores the receipt. When this returns, the turn is committed. The commit completes even if the caller
    /// is canceled.
    ///
    /// # Errors
    /// The session was deleted in the meantime, another server has moved its head ([`StoreError::Stale`] if the client
    /// named the head, otherwise [`StoreError::Conflict`]) or has answered the same request, a quota or the disk is
    /// full, or the disk fails.
    pub async fn commit(
        mut self,
        snapshot: Arc<Snapshot>,
        note: TurnNote,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
        version: VersionId,
    ) -> Result<Session, StoreError> {
        let commit = async move {
            self.create_session().await?;
            let Self { inner, owner, session, expectation, lease, reserved, text_reserved, forks, repeats, .. } = self;
            if repeats && let Some(session) = inner.committed(owner, &session.id, &version).await? {
                return Ok(session);
            }
            let parent = session.head.id.clone();
            let _room = inner.admit_receipt(owner, receipt.as_ref()).await?;
            let text = inner.prepare_text(owner, note.text.as_ref(), text_reserved).await?;
            let forks = inner.prepare_forks(owner, forks, &parent).await?;
            let Prepared { version: mut new, upload } =
                match inner.prepare(owner, &version, &snapshot, Some(reserved)).await {
                    Ok(prepared) => prepared,
                    Err(error) => return Err(inner.abandon_forks(forks, error).await),
                };
            note.describe(&mut new.row, (&session.id, &parent));
            new.add_text(text);
            let mut commit = Commit {
                owner,
                session: session.id.clone(),
                expected: parent,
                version: new,
                forks: forks.versions(),
                max_sessions: inner.options.owner_sessions,
                bounds: inner.bounds(),
                now: now(),
                receipt: receipt.map(|receipt| inner.kept_receipt(receipt)),
            };
            let mut committed = inner.commit(&commit).await;
            if let Err(StoreError::Stale { head }) = &committed
                && inner.index.opened() != expectation.opened
            {
                // The index has lost the expected head, which was not on disk yet. Only this server uses the index, and
                // the lease keeps other requests from the session, so the turn can replace what was lost: its snapshot
                // has the whole state.
                commit.expected = head.clone();
                committed = inner.commit(&commit).await;
            }
            drop(upload);
            match committed {
                Ok((row, head)) => {
                    if head.seed.is_none() {
                        inner.remember(&version, &snapshot);
                    }
                    inner.remember_forks(&session.id, &forks);
                    count(&inner.counters.commits, 1);
                    count(&inner.counters.forks, forks.len());
                    drop(lease);
                    inner.session(session.id, row, head)
                }
                Err(error) if repeats => {
                    inner.count_conflict(&error);
                    let error = inner.abandon_forks(forks, expectation.refusal(error)).await;
                    // The object stays, because it may belong to another server's commit of the same version.
                    let committed = inner.committed(owner, &session.id, &version).await.ok().flatten();
                    committed.ok_or(error)
                }
                Err(error) => {
                    inner.count_conflict(&error);
                    let error = inner.abandon_forks(forks, expectation.refusal(error)).await;
                    Err(inner.abandon(&version, error).await)
                }
            }
        };
        detached(commit).await
    }
}
