//! An index that several servers in one process share, for tests: the embedded index in memory, with streams, and with
//! servers that die at a chosen moment. A request that a dead server makes of the index never returns.

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
use super::measured::operations;
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
    pub(crate) objects: Arc<dyn ObjectStore>,
    streams: Mutex<Streams>,
}

#[derive(Debug, Default)]
struct Streams {
    rows: HashMap<(Owner, String), StreamRow>,
    holders: HashMap<String, usize>,
    dead: HashSet<usize>,
    /// Servers that are alive but have not been seen for too long.
    lapsed: HashSet<usize>,
    servers: usize,
}

/// The index as one server sees it.
#[derive(Debug)]
pub(crate) struct Member {
    cluster: Arc<Cluster>,
    number: usize,
    state: Mutex<State>,
    /// Notified when the server is asked to commit and dies or hangs.
    pub(crate) died: Notify,
    /// Wakes a server that hangs.
    pub(crate) wakes: Notify,
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

    /// Adds a server, and returns its view of the index and its store.
    pub(crate) fn join(self: &Arc<Self>, codec: Arc<dyn SnapshotCodec>) -> (Arc<Member>, Store) {
        let mut streams = self.lock();
        streams.servers += 1;
        let number = streams.servers;
        drop(streams);
        let member = Member {
            cluster: Arc::clone(self),
            number,
            state: Mutex::default(),
            died: Notify::new(),
            wakes: Notify::new(),
        };
        let (member, objects) = (Arc::new(member), Arc::clone(&self.objects));
        let index: Arc<dyn Index> = Arc::<Member>::clone(&member);
        (member, Store::over(index, objects, StoreOptions::new(Location::Memory), codec))
    }

    /// Returns the number of recorded streams.
    pub(crate) fn streams(&self) -> usize {
        self.lock().rows.len()
    }

    /// Changes the record of every stream.
    pub(crate) fn change_streams(&self, change: impl Fn(&[u8]) -> Vec<u8>) {
        self.lock().rows.values_mut().for_each(|row| row.record = change(&row.record));
    }

    /// Returns whether a server holds the stream.
    pub(crate) fn is_held(&self, id: &str) -> bool {
        self.lock().holders.contains_key(id)
    }

    fn lock(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// Makes the server die when it is next asked to commit.
    pub(crate) fn dies(&self, when: Death) {
        self.lock().dies = Some(when);
    }

    /// Makes the server hang instead of dying, so that it counts as alive.
    pub(crate) fn hangs(&self) {
        self.lock().hangs = true;
    }

    /// Kills the server.
    pub(crate) fn kill(&self) {
        self.cluster.lock().dead.insert(self.number);
    }

    /// Lets other servers take over this server's streams, although it is alive.
    pub(crate) fn lapses(&self) {
        self.cluster.lock().lapsed.insert(self.number);
    }

    /// Makes the server fail to record streams and to withdraw records.
    pub(crate) fn refuses_streams(&self) {
        self.lock().refuses_streams = true;
    }

    fn accepts_streams(&self) -> Result<(), StoreError> {
        let refused = || StoreError::Unavailable { reason: "the test says so".to_owned() };
        if self.lock().refuses_streams { Err(refused()) } else { Ok(()) }
    }

    async fn die(&self) {
        let hangs = self.lock().hangs;
        if !hangs {
            self.kill();
        }
        self.died.notify_one();
        if hangs {
            self.wakes.notified().await;
        }
        self.alive().await;
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

macro_rules! member {
    ($($kind:literal $name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        #[async_trait]
        impl Index for Member {
            $(
                async fn $name(&self, $($argument: $of),*) -> Result<$result, StoreError> {
                    self.alive().await;
                    self.cluster.index.$name($($argument),*).await
                }
            )*

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

            fn capacity(&self) -> &Capacity {
                self.cluster.index.capacity()
            }

            fn names_all(&self) -> bool {
                self.cluster.index.names_all()
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

            fn is_shared(&self) -> bool {
                true
            }

            async fn put_stream(&self, stream: NewStream) -> Result<(), StoreError> {
                self.alive().await;
                self.accepts_streams()?;
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
                let held = streams.holders.get(id).is_some_and(|by| *by != self.number && !streams.dead.contains(by) && !streams.lapsed.contains(by));
                if !held {
                    streams.holders.insert(id.to_owned(), self.number);
                }
                Ok(!held)
            }

            async fn release_stream(&self, owner: Owner, id: &str, record: Option<Vec<u8>>) {
                self.alive().await;
                let mut streams = self.cluster.lock();
                if streams.holders.get(id) == Some(&self.number) {
                    streams.holders.remove(id);
                    if let (Some(row), Some(record)) = (streams.rows.get_mut(&(owner, id.to_owned())), record) {
                        row.record = record;
                    }
                }
            }

            async fn keep_stream(&self, owner: Owner, id: &str, _: u64) -> Result<(), StoreError> {
                self.release_stream(owner, id, None).await;
                Ok(())
            }

            async fn withdraw_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
                self.alive().await;
                self.accepts_streams()?;
                let mut streams = self.cluster.lock();
                let held = streams.holders.get(id) == Some(&self.number);
                Ok(held && streams.rows.remove(&(owner, id.to_owned())).is_some())
            }

            async fn delete_stream(&self, owner: Owner, id: &str) -> Result<(), StoreError> {
                self.alive().await;
                self.cluster.lock().rows.remove(&(owner, id.to_owned()));
                Ok(())
            }
        }
    };
}

operations!(member {
    "sweep" orphans(ids: Vec<VersionId>) -> Vec<VersionId>;
    "other" ready() -> ();
    "other" flush() -> ();
    "other" close() -> ();
});
