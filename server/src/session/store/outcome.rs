//! What became of a change whose outcome is unknown, because the index failed while it was made.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::inner::{Inner, Store, now};
use crate::session::backend::pauses;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Commit, Head, Listed, Rewind};

/// How long a request waits for a shared index that is out of reach.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 8 });

/// How often an operation is repeated at least.
const FEW: usize = 2;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Whether a change that failed so may have been made.
pub(super) fn is_unknown(error: &StoreError) -> bool {
    matches!(error, StoreError::Unavailable { .. } | StoreError::Full { .. })
}

impl Store {
    /// The error of a request that has found another head than it expects. If its key has an answer, it is a retry of the
    /// request that has moved the head, and is told so.
    pub async fn unless_answered(&self, owner: Owner, key: Option<&str>, error: StoreError) -> StoreError {
        self.inner.unless_answered(owner, key, error).await
    }
}

impl Inner {
    /// Repeats an operation while a shared index is out of reach, for some seconds. Repeating it must change nothing.
    pub(super) async fn repeated<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        operation: impl Fn() -> F,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let mut result = operation().await;
        for (attempt, pause) in pauses(FIRST_PAUSE, LONGEST_PAUSE).enumerate() {
            let failed = self.index.is_shared() && matches!(result, Err(StoreError::Unavailable { .. }));
            // An index that works may have failed for another reason, which stays.
            let may_help = attempt < FEW || self.index.failure().is_some();
            if !failed || !may_help || began.elapsed() + pause > PATIENCE {
                break;
            }
            sleep(pause).await;
            result = operation().await;
        }
        result
    }

    /// Ends a turn. A commit whose outcome is unknown is repeated: its version and the head that it expects are the same, so of
    /// all attempts only one can be carried out, and the others find the head that this one has made.
    pub(super) async fn commit(&self, commit: &Commit) -> Result<Head, StoreError> {
        let committed = self.repeated(|| self.index.commit(commit.clone())).await;
        let Err(error) = committed else { return committed };
        let is_refused = matches!(error, StoreError::Stale { .. } | StoreError::Answered);
        let may_be_there = is_unknown(&error) || (self.index.is_shared() && is_refused);
        if !may_be_there {
            return Err(error);
        }
        match self.find_commit(commit.owner, &commit.session, &commit.version.id).await {
            Ok(Some(head)) => return Ok(head),
            Ok(None) => {}
            Err(unread) => return Err(if is_refused { unread } else { error }),
        }
        if is_refused {
            self.rule_out(&commit.version.id).await?;
        }
        let key = commit.receipt.as_ref().map(|receipt| &*receipt.key);
        match error {
            StoreError::Stale { .. } => Err(self.unless_answered(commit.owner, key, error).await),
            error => Err(error),
        }
    }

    /// Makes sure that a commit of this version, which was refused, is not carried out later: an earlier attempt may still be on
    /// its way, and the head may come back to where it started.
    async fn rule_out(&self, version: &VersionId) -> Result<(), StoreError> {
        if self.repeated(|| self.index.orphans(vec![version.clone()])).await?.contains(version) {
            return Ok(());
        }
        Err(StoreError::Unavailable { reason: format!("version {version} may have been stored after all") })
    }

    async fn unless_answered(&self, owner: Owner, key: Option<&str>, error: StoreError) -> StoreError {
        let Some(key) = key else { return error };
        match self.repeated(|| self.index.receipt(owner, key)).await {
            Ok(Some((ends, _))) if ends > now() => StoreError::Answered,
            Ok(_) => error,
            // Nobody knows whether it is a retry, which must not be refused for good.
            Err(unknown) => unknown,
        }
    }

    /// The session and its version, if a commit has made it after all.
    async fn find_commit(
        &self,
        owner: Owner,
        session: &SessionId,
        version: &VersionId,
    ) -> Result<Option<Head>, StoreError> {
        if !self.index.is_shared() {
            let (row, head) = self.index.head(owner, session).await?;
            return Ok((row.head == version.as_str()).then_some((row, head)));
        }
        // Another server may have moved the head since.
        let found = async || {
            let Listed { id, row: found, .. } =
                self.repeated(|| self.index.listed(owner, session, Some(version))).await?;
            let mut row = self.repeated(|| self.index.session(owner, session)).await?;
            row.head = id;
            Ok((row, found))
        };
        match found().await {
            Err(StoreError::NotFound { .. }) => Ok(None),
            found => found.map(Some),
        }
    }

    /// After an error that leaves it unknown: the session and its head, if the session was created and its head is `version`.
    pub(super) async fn find_created(
        &self,
        owner: Owner,
        session: &SessionId,
        version: Option<&VersionId>,
        error: &StoreError,
    ) -> Option<Head> {
        if !is_unknown(error) {
            return None;
        }
        let found = self.repeated(|| self.index.head(owner, session)).await.ok()?;
        version.is_none_or(|version| version.as_str() == found.0.head).then_some(found)
    }

    /// Moves a session's head.
    pub(super) async fn moved(&self, rewind: &Rewind) -> Result<Head, StoreError> {
        match self.repeated(|| self.index.rewind(rewind.clone())).await {
            // An earlier attempt has moved it.
            Err(StoreError::Stale { head }) if self.index.is_shared() && head == rewind.to => {
                self.index.head(rewind.owner, &rewind.session).await
            }
            moved => moved,
        }
    }
}
