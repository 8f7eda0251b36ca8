//! An index that several servers in one process share, for tests: the embedded one in memory, with streams, and with servers
//! that die at a chosen moment. What a dead server asks of it never returns.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio::sync::Notify;

use super::disk::SystemDisk;
use super::embedded::EmbeddedIndex;
use super::error::StoreError;
use super::id::{Owner, ResponseId, SessionId, VersionId};
use super::index::{
    Capacity, Commit, Create, Edit, Edited, Exempt, Fork, Forks, Head, Index, Listed, Missing, NewReceipt, NewResponse,
    NewStream, ResponseRow, Rewind, SessionRow, StreamRow, VersionRow, Victims,
};
use super::store::{Location, SnapshotCodec, Store, StoreOptions};

/// When a server dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    BeforeCommit,
    AfterCommit,
}

/// What several servers share.
#[derive(Debug)]
pub(crate) struct Cluster {
    index: EmbeddedIndex,
    objects: Arc<dyn ObjectStore>,
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Streams {
    rows: HashMap<(Owner, String), StreamRow>,
    holders: HashMap<String, usize>,
    dead: HashSet<usize>,
    servers: usize,
}

/// The index as one server sees it.
#[derive(Debug)]
pub(crate) struct Member {
    cluster: Arc<Cluster>,
    number: usize,
    state: Mutex<State>,
    /// Notified when the server is asked to commit and dies.
    pub(crate) died: Notify,
}

#[derive(Debug, Default)]
struct State {
    dies: Option<Death>,
    hangs: bool,
    refuses_streams: bool,
}

impl Cluster {
    pub(crate) fn new() -> Arc<Self> {
        let index = EmbeddedIndex::open(
            Arc::new(SystemDisk),
            None,
            false,
            &|_, _| true,
            Box::new(|_: &[VersionId]| ()),
            Box::new(|| Ok(())),
        );
        let (index, objects) = (index.expect("the index opens"), Arc::new(InMemory::new()));
        Arc::new(Self { index, objects, streams: Mutex::default() })
    }

    /// The store of a new server.
    pub(crate) fn join(self: &Arc<Self>, codec: Arc<dyn SnapshotCodec>) -> (Arc<Member>, Store) {
        let mut streams = self.lock();
        streams.servers += 1;
        let number = streams.servers;
        drop(streams);
        let member = Member { cluster: Arc::clone(self), number, state: Mutex::default(), died: Notify::new() };
        let (member, objects) = (Arc::new(member), Arc::clone(&self.objects));
        let index: Arc<dyn Index> = Arc::<Member>::clone(&member);
        (member, Store::over(index, objects, StoreOptions::new(Location::Memory), codec))
    }

    /// The number of streams that are recorded.
    pub(crate) fn streams(&self) -> usize {
        self.lock().rows.len()
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// Lets the server die when it is next asked to commit.
    pub(crate) fn dies(&self, when: Death) {
        self.lock().dies = Some(when);
    }

    /// Lets the server hang instead of dying, so that it counts as alive.
    pub(crate) fn hangs(&self) {
        self.lock().hangs = true;
    }

    /// Kills the server.
    pub(crate) fn kill(&self) {
        self.cluster.lock().dead.insert(self.number);
    }

    /// Lets the server fail to record streams.
    pub(crate) fn refuses_streams(&self) {
        self.lock().refuses_streams = true;
    }

    async fn die(&self) {
        if !self.lock().hangs {
            self.kill();
        }
        self.died.notify_one();
        std::future::pending::<()>().await;
    }

    async fn alive(&self) {
        if self.cluster.lock().dead.contains(&self.number) {
            std::future::pending::<()>().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Index for Member {
    async fn session(&self, owner: Owner, id: &SessionId) -> Result<SessionRow, StoreError> {
        self.alive().await;
        self.cluster.index.session(owner, id).await
    }

    async fn head(&self, owner: Owner, id: &SessionId) -> Result<Head, StoreError> {
        self.alive().await;
        self.cluster.index.head(owner, id).await
    }

    async fn list(
        &self,
        owner: Owner,
        after: Option<u64>,
        newest_first: bool,
        limit: usize,
    ) -> Result<Vec<(SessionId, Head)>, StoreError> {
        self.alive().await;
        self.cluster.index.list(owner, after, newest_first, limit).await
    }

    async fn versions(&self, owner: Owner, id: &SessionId) -> Result<(SessionRow, Vec<Listed>), StoreError> {
        self.alive().await;
        self.cluster.index.versions(owner, id).await
    }

    async fn listed(&self, owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Result<Listed, StoreError> {
        self.alive().await;
        self.cluster.index.listed(owner, id, version).await
    }

    async fn version(&self, owner: Owner, id: &VersionId) -> Result<Option<VersionRow>, StoreError> {
        self.alive().await;
        self.cluster.index.version(owner, id).await
    }

    async fn chain(&self, owner: Owner, id: &str, limit: usize) -> Result<Vec<(String, VersionRow)>, StoreError> {
        self.alive().await;
        self.cluster.index.chain(owner, id, limit).await
    }

    async fn text(&self, version: &str, bytes: usize) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.alive().await;
        self.cluster.index.text(version, bytes).await
    }

    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError> {
        self.alive().await;
        self.cluster.index.response(owner, id).await
    }

    async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<(u64, Vec<u8>)>, StoreError> {
        self.alive().await;
        self.cluster.index.receipt(owner, key).await
    }

    async fn may_create(&self, owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.may_create(owner, id, max_sessions).await
    }

    async fn create(&self, create: Create) -> Result<Head, StoreError> {
        self.alive().await;
        self.cluster.index.create(create).await
    }

    async fn commit(&self, commit: Commit) -> Result<Head, StoreError> {
        self.alive().await;
        let dies = self.lock().dies;
        if dies == Some(Death::BeforeCommit) {
            self.die().await;
        }
        let committed = self.cluster.index.commit(commit).await;
        if dies == Some(Death::AfterCommit) {
            self.die().await;
        }
        committed
    }

    async fn rewind(&self, rewind: Rewind) -> Result<Head, StoreError> {
        self.alive().await;
        self.cluster.index.rewind(rewind).await
    }

    async fn may_fork(
        &self,
        owner: Owner,
        from: (&SessionId, &VersionId),
        n: usize,
        max_sessions: usize,
    ) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.may_fork(owner, from, n, max_sessions).await
    }

    async fn fork(&self, fork: Fork) -> Result<Forks, StoreError> {
        self.alive().await;
        self.cluster.index.fork(fork).await
    }

    async fn edit(&self, owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Result<Edited, StoreError> {
        self.alive().await;
        self.cluster.index.edit(owner, id, edit, now).await
    }

    async fn delete(&self, owner: Owner, id: &SessionId) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.delete(owner, id).await
    }

    async fn record_uses(&self, uses: HashMap<SessionId, u64>) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.record_uses(uses).await
    }

    async fn put_response(&self, response: NewResponse) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.put_response(response).await
    }

    async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.delete_response(owner, id).await
    }

    async fn put_receipt(&self, owner: Owner, receipt: NewReceipt<Vec<u8>>) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.put_receipt(owner, receipt).await
    }

    fn capacity(&self) -> &Capacity {
        self.cluster.index.capacity()
    }

    async fn can_sweep(&self, now: u64, exempt: Exempt) -> Result<bool, StoreError> {
        self.alive().await;
        self.cluster.index.can_sweep(now, exempt).await
    }

    async fn expire(&self, now: u64, exempt: Exempt) -> Result<usize, StoreError> {
        self.alive().await;
        self.cluster.index.expire(now, exempt).await
    }

    async fn prune_texts(&self) -> Result<usize, StoreError> {
        self.alive().await;
        self.cluster.index.prune_texts().await
    }

    async fn can_evict(&self, victims: Victims, missing: u64) -> Result<bool, StoreError> {
        self.alive().await;
        self.cluster.index.can_evict(victims, missing).await
    }

    async fn evict(&self, victims: Victims, missing: u64, lineage: usize) -> Result<Option<usize>, StoreError> {
        self.alive().await;
        self.cluster.index.evict(victims, missing, lineage).await
    }

    async fn garbage(&self, limit: usize) -> Result<Vec<VersionId>, StoreError> {
        self.alive().await;
        self.cluster.index.garbage(limit).await
    }

    async fn forget_garbage(&self, ids: Vec<VersionId>) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.forget_garbage(ids).await
    }

    async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError> {
        self.alive().await;
        self.cluster.index.orphans(ids).await
    }

    fn names_all(&self) -> bool {
        self.cluster.index.names_all()
    }

    async fn missing(&self, objects: HashSet<String>) -> Result<Missing, StoreError> {
        self.alive().await;
        self.cluster.index.missing(objects).await
    }

    async fn ready(&self) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.ready().await
    }

    fn failure(&self) -> Option<StoreError> {
        self.cluster.index.failure()
    }

    fn opened(&self) -> u64 {
        self.cluster.index.opened()
    }

    fn transactions(&self) -> u64 {
        self.cluster.index.transactions()
    }

    async fn flush(&self) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.flush().await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.index.close().await
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn put_stream(&self, stream: NewStream) -> Result<(), StoreError> {
        self.alive().await;
        if self.lock().refuses_streams {
            return Err(StoreError::Unavailable { reason: "the test says so".to_owned() });
        }
        let NewStream { id, row, .. } = stream;
        let mut streams = self.cluster.lock();
        streams.holders.insert(id.clone(), self.number);
        streams.rows.insert((row.owner, id), row);
        Ok(())
    }

    async fn stream(&self, owner: Owner, id: &str) -> Result<StreamRow, StoreError> {
        self.alive().await;
        self.cluster.lock().rows.get(&(owner, id.to_owned())).cloned().ok_or(StoreError::STREAM)
    }

    async fn take_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.alive().await;
        let mut streams = self.cluster.lock();
        if !streams.rows.contains_key(&(owner, id.to_owned())) {
            return Err(StoreError::STREAM);
        }
        let held = streams.holders.get(id).is_some_and(|by| *by != self.number && !streams.dead.contains(by));
        if !held {
            streams.holders.insert(id.to_owned(), self.number);
        }
        Ok(!held)
    }

    async fn release_stream(&self, _: Owner, id: &str) {
        self.alive().await;
        let mut streams = self.cluster.lock();
        if streams.holders.get(id) == Some(&self.number) {
            streams.holders.remove(id);
        }
    }

    async fn delete_stream(&self, owner: Owner, id: &str) -> Result<(), StoreError> {
        self.alive().await;
        self.cluster.lock().rows.remove(&(owner, id.to_owned()));
        Ok(())
    }
}
