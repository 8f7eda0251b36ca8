//! The index in PostgreSQL: an implementation of [`Index`] for several servers at once.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use async_trait::async_trait;

use super::background::Tasks;
use super::database::Database;
use super::reads::{Lists, Reads};
use super::servers::Leader;
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::index::{
    Capacity, Commit, Create, Edit, Edited, Exempt, Fork, Forks, Head, Index, Listed, Missing, NewReceipt, NewResponse,
    NewStream, NewVersion, ResponseRow, Rewind, SessionRow, StreamRow, Transaction, VersionRow, Victims, operations,
};

/// An index that several servers share.
pub(crate) struct PostgresIndex {
    pub(super) database: Arc<Database>,
    pub(super) leader: Leader,
    pub(super) tasks: Tasks,
}

impl fmt::Debug for PostgresIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.database.fmt(f)
    }
}

/// Returns the ids of the texts that the texts of new versions continue.
fn parents<'v>(versions: impl IntoIterator<Item = &'v NewVersion>) -> Vec<String> {
    let with_text = versions.into_iter().filter(|version| version.text.is_some());
    let mut parents: Vec<String> = with_text.filter_map(|version| version.row.parent.clone()).collect();
    parents.dedup();
    parents
}

fn key<A>(receipt: Option<&NewReceipt<A>>) -> Vec<String> {
    receipt.map(|receipt| receipt.key.clone()).into_iter().collect()
}

#[async_trait]
impl Index for PostgresIndex {
    async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        self.database.session(owner, id).await
    }

    async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError> {
        self.database.head(owner, id).await
    }

    async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError> {
        self.database.list(owner, after, newest_first, limit).await
    }

    async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError> {
        self.database.versions(owner, id).await
    }

    async fn listed(&self, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Result<Listed, StoreError> {
        self.database.listed(owner, id, version).await
    }

    async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError> {
        self.database.version(owner, id).await
    }

    async fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, StoreError> {
        self.database.chain(owner, id, limit).await
    }

    async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.database.text(version, bytes).await
    }

    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError> {
        self.database.response(owner, id.as_str()).await
    }

    async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        self.database.receipt(owner, key).await
    }

    async fn may_create(&self, owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> Result<(), StoreError> {
        let sessions = id.map(ToString::to_string).into_iter().collect();
        let found = self.database.read(owner, &Reads { sessions, ..Reads::default() }).await?;
        operations::check_create(&found, owner, id, max_sessions).map(drop)
    }

    async fn create(&self, create: Create) -> Result<Head, StoreError> {
        let reads = Reads {
            // Everything that a replaced session lists is removed.
            lists: if create.replace { Lists::All } else { Lists::None },
            versions: vec![create.row.head.clone()],
            texts: parents(&create.version),
            receipts: key(create.receipt.as_ref()),
            ..Reads::session(create.id.as_str())
        };
        self.database.write(create.row.owner, reads, |work| operations::create(work, &create)).await
    }

    async fn commit(&self, commit: Commit) -> Result<Head, StoreError> {
        let forks = commit.forks.iter().map(|(_, version)| version);
        let reads = Reads {
            // Forks list what the session lists.
            lists: if commit.forks.is_empty() { Lists::Beyond(commit.bounds.lineage) } else { Lists::All },
            texts: parents(forks.chain([&commit.version])),
            receipts: key(commit.receipt.as_ref()),
            ..Reads::session(commit.session.as_str())
        };
        self.database.write(commit.owner, reads, |work| operations::commit(work, &commit)).await
    }

    async fn rewind(&self, rewind: Rewind) -> Result<Head, StoreError> {
        let reads = Reads {
            lists: Lists::All,
            chain: Some((rewind.to.to_string(), rewind.bounds.most_adopted() + 1)),
            ..Reads::session(rewind.session.as_str())
        };
        self.database.write(rewind.owner, reads, |work| operations::rewind(work, &rewind)).await
    }

    async fn may_fork(
        &self,
        owner: Owner,
        (session, from): (&SessionId, &VersionId),
        n: usize,
        max_sessions: usize,
    ) -> Result<(), StoreError> {
        let reads = Reads { lists: Lists::All, ..Reads::session(session.as_str()) };
        let found = self.database.read(owner, &reads).await?;
        operations::check_fork(&found, owner, (session.as_str(), from.as_str()), n, max_sessions).map(drop)
    }

    async fn fork(&self, fork: Fork) -> Result<Forks, StoreError> {
        let reads =
            Reads { lists: Lists::All, receipts: key(fork.receipt.as_ref()), ..Reads::session(fork.session.as_str()) };
        self.database.write(fork.owner, reads, |work| operations::fork(work, &fork)).await
    }

    async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Result<Edited, StoreError> {
        let reads = Reads { lists: Lists::All, ..Reads::session(id.as_str()) };
        self.database.write(owner, reads, |work| operations::edit(work, owner, id.as_str(), &edit, now)).await
    }

    async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        let reads = Reads { lists: Lists::All, ..Reads::session(id.as_str()) };
        self.database.write(owner, reads, |work| operations::delete(work, owner, id.as_str())).await
    }

    async fn record_uses(&self, uses: HashMap<SessionId, u64>) -> Result<(), StoreError> {
        self.database.record_uses(&uses.into_iter().collect::<Vec<_>>()).await
    }

    async fn put_response(&self, response: NewResponse) -> Result<(), StoreError> {
        let reads =
            Reads { texts: parents([&response.version]), receipts: key(response.receipt.as_ref()), ..Reads::default() };
        self.database.write(response.row.owner, reads, |work| operations::store_response(work, &response)).await
    }

    async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        let reads = Reads { responses: vec![id.to_string()], ..Reads::default() };
        self.database.write(owner, reads, |work| work.remove_response(id.as_str())).await
    }

    async fn put_receipt(&self, owner: Owner, receipt: NewReceipt<Vec<u8>>) -> Result<(), StoreError> {
        let reads = Reads { receipts: vec![receipt.key.clone()], ..Reads::default() };
        self.database.write(owner, reads, |work| work.put_receipt(owner, &receipt)).await
    }

    fn capacity(&self) -> &Capacity {
        &self.database.ledger.capacity
    }

    async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError> {
        self.database.can_sweep(now, exempt).await
    }

    async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError> {
        self.database.expire(now, exempt).await
    }

    async fn prune_texts(&self) -> Result<usize, StoreError> {
        self.database.prune_texts().await
    }

    async fn can_evict(&self, victims: Victims, missing: u64) -> Result<bool, StoreError> {
        self.database.can_evict(&victims, missing).await
    }

    async fn evict(&self, victims: Victims, missing: u64, lineage: usize) -> Result<Option<usize>, StoreError> {
        self.database.evict(&victims, missing, lineage).await
    }

    async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError> {
        self.database.garbage(limit).await
    }

    async fn forget_garbage(&self, ids: Vec<VersionId>) -> Result<(), StoreError> {
        self.database.forget_garbage(&ids).await
    }

    async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError> {
        self.database.orphans(&ids).await
    }

    fn names_all(&self) -> bool {
        true
    }

    async fn missing(&self, objects: HashSet<String>) -> Result<Missing, StoreError> {
        self.database.missing(&objects).await
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn lease(&self, session: &SessionId) -> Result<bool, StoreError> {
        self.database.lease(session).await
    }

    async fn release(&self, session: &SessionId) {
        self.database.release(session).await;
    }

    async fn leads(&self) -> Result<bool, StoreError> {
        self.database.leads(&self.leader).await
    }

    async fn put_stream(&self, stream: NewStream) -> Result<(), StoreError> {
        self.database.put_stream(stream).await
    }

    async fn stream(&self, owner: Owner, id: &str) -> Result<StreamRow, StoreError> {
        self.database.stream(owner, id).await
    }

    async fn take_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.database.take_stream(owner, id).await
    }

    async fn release_stream(&self, owner: Owner, id: &str, record: Option<Vec<u8>>) {
        self.database.release_stream(owner, id, record).await;
    }

    async fn keep_stream(&self, owner: Owner, id: &str, ends: u64) -> Result<(), StoreError> {
        self.database.keep_stream(owner, id, ends).await
    }

    async fn withdraw_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.database.withdraw_stream(owner, id).await
    }

    async fn delete_stream(&self, owner: Owner, id: &str) -> Result<(), StoreError> {
        self.database.delete_stream(owner, id).await
    }

    async fn ready(&self) -> Result<(), StoreError> {
        self.database.health.check()
    }

    fn failure(&self) -> Option<StoreError> {
        self.database.health.failure()
    }

    fn opened(&self) -> u64 {
        1
    }

    fn transactions(&self) -> u64 {
        self.database.transactions.load(Ordering::Relaxed)
    }

    /// Nothing is committed before it is durable.
    async fn flush(&self) -> Result<(), StoreError> {
        self.database.health.check()
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.tasks.stop();
        self.leader.leave().await;
        if let Err(error) = self.database.leave().await {
            tracing::debug!(%error, "the other servers find out by themselves that this one has ended");
        }
        self.database.health.close();
        self.database.connections.close();
        self.database.own.close();
        Ok(())
    }
}
