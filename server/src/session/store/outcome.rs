//! Resolves changes whose outcome is unknown because the index failed while it made them.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::inner::{Inner, Store, now};
use crate::session::backend::pauses;
use crate::session::error::StoreError;
use crate::session::id::{Owner, SessionId, VersionId};
use crate::session::index::{Commit, Head, Listed, Rewind};

/// How long a request waits for a shared index that is unreachable.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 8 });

/// Number of times that a failed operation is repeated even if the index works.
const FEW: usize = 2;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Returns whether a change that failed with this error may have been made.
pub(super) fn is_unknown(error: &StoreError) -> bool {
    matches!(error, StoreError::Unavailable { .. } | StoreError::Full { .. })
}

impl Store {
    /// Returns the error for a request that found a different head than it expects. If the request's key has an answer,
    /// the request is a retry of the one that moved the head, and the error is [`StoreError::Answered`].
    pub async fn unless_answered(&self, owner: Owner, key: Option<&str>, error: StoreError) -> StoreError {
        self.inner.unless_answered(owner, key, error).await
    }
}

impl Inner {
    /// Repeats an operation while a shared index is unreachable, for some seconds. The operation must be idempotent.
    pub(super) async fn repeated<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        operation: impl Fn() -> F,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let mut result = operation().await;
        for (attempt, pause) in pauses(FIRST_PAUSE, LONGEST_PAUSE).enumerate() {
            let failed = self.index.is_shared() && matches!(result, Err(StoreError::Unavailable { .. }));
            // If the index works, the failure may have another cause, which repetition does not fix.
            let may_help = attempt < FEW || self.index.failure().is_some();
            if !failed || !may_help || began.elapsed() + pause > PATIENCE {
                break;
            }
            sleep(pause).await;
            result = operation().await;
        }
        result
    }

    /// Commits a turn. A commit whose outcome is unknown is repeated: every attempt has the same version and expects
    /// the same head, so at most one attempt can be carried out, and the others find the head that it made.
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

    /// Ensures that a refused commit of this version is not carried out later: an earlier attempt may still be in
    /// flight, and the head may return to the version that it expects.
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
            // It is unknown whether the request is a retry; a retry must not be refused for good.
            Err(unknown) => unknown,
        }
    }

    /// Returns the session and its version if a commit has created the version after all.
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

    /// Returns the session and its head if the session was created and its head is `version`, after an error that
    /// leaves this unknown. If `version` is `None`, any head matches.
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

    /// Moves a session's head, repeating attempts while a shared index is unreachable.
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
