//! Two stores over one index and one object store, as on two servers. The index is the embedded one, plus what shared
//! servers need; tests decide when it and the object store fail.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult,
};
use tokio::sync::Notify;

use super::{Tokens, open};
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, SessionId, VersionId};
use crate::session::index::*;
use crate::session::measured::operations;
use crate::session::store::{Location, Store, StoreOptions};

/// The state that all servers see.
#[derive(Debug, Default)]
struct Common {
    leases: Mutex<HashMap<SessionId, usize>>,
    leader: AtomicUsize,
    /// Objects that the sweep has claimed. Each commit holds the lock.
    claimed: tokio::sync::Mutex<HashSet<VersionId>>,
}

/// The index as one server sees it.
#[derive(Debug)]
pub(super) struct Shared {
    index: Arc<dyn Index>,
    common: Arc<Common>,
    server: usize,
    pub(super) is_down: AtomicBool,
    /// Whether the connection breaks at the next commit, so that its answer is lost.
    pub(super) breaks: AtomicBool,
    /// The operation that never ends, if there is one.
    pub(super) hanging: Mutex<&'static str>,
    /// Notified when a commit arrives.
    pub(super) arrived: Notify,
    /// No commit proceeds while a test holds it.
    pub(super) gate: tokio::sync::Mutex<()>,
}

pub(super) fn down() -> StoreError {
    StoreError::Unavailable { reason: "PostgreSQL: it is down".to_owned() }
}

impl Shared {
    fn reach(&self) -> Result<(), StoreError> {
        self.failure().map_or(Ok(()), Err)
    }

    /// Takes a session's lease away from the server that holds it.
    pub(super) fn steal(&self, session: &SessionId) {
        self.common.leases.lock().expect("the leases").remove(session);
    }

    pub(super) fn is_leased(&self, session: &SessionId) -> bool {
        self.common.leases.lock().expect("the leases").contains_key(session)
    }

    /// Makes this server the leader.
    pub(super) fn lead(&self) {
        self.common.leader.store(self.server, SeqCst);
    }
}

macro_rules! shared {
    ($($kind:literal $name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        #[async_trait]
        impl Index for Shared {
            $(
                async fn $name(&self, $($argument: $of),*) -> Result<$result, StoreError> {
                    self.reach()?;
                    if *self.hanging.lock().expect("its name") == stringify!($name) {
                        std::future::pending::<()>().await;
                    }
                    self.index.$name($($argument),*).await
                }
            )*

            async fn commit(&self, commit: Commit) -> Result<Head, StoreError> {
                self.arrived.notify_one();
                drop(self.gate.lock().await);
                self.reach()?;
                let claimed = self.common.claimed.lock().await;
                if claimed.contains(&commit.version.id) {
                    return Err(StoreError::Unavailable { reason: "its snapshot was removed".to_owned() });
                }
                let committed = self.index.commit(commit).await;
                if self.breaks.swap(false, SeqCst) {
                    self.is_down.store(true, SeqCst);
                    return Err(down());
                }
                committed
            }

            async fn orphans(&self, ids: Vec<VersionId>) -> Result<Vec<VersionId>, StoreError> {
                self.reach()?;
                let mut claimed = self.common.claimed.lock().await;
                let orphans = self.index.orphans(ids).await?;
                claimed.extend(orphans.iter().cloned());
                Ok(orphans)
            }

            async fn lease(&self, session: &SessionId) -> Result<bool, StoreError> {
                self.reach()?;
                let mut leases = self.common.leases.lock().expect("the leases");
                Ok(*leases.entry(session.clone()).or_insert(self.server) == self.server)
            }

            async fn release(&self, session: &SessionId) {
                let mut leases = self.common.leases.lock().expect("the leases");
                if leases.get(session) == Some(&self.server) {
                    leases.remove(session);
                }
            }

            async fn leads(&self) -> Result<bool, StoreError> {
                self.reach()?;
                Ok(self.common.leader.load(SeqCst) == self.server)
            }

            async fn ready(&self) -> Result<(), StoreError> {
                self.reach()
            }

            fn failure(&self) -> Option<StoreError> {
                self.is_down.load(SeqCst).then(down)
            }

            fn is_shared(&self) -> bool {
                true
            }

            async fn flush(&self) -> Result<(), StoreError> {
                Ok(())
            }

            async fn close(&self) -> Result<(), StoreError> {
                Ok(())
            }

            fn capacity(&self) -> &Capacity {
                self.index.capacity()
            }

            fn names_all(&self) -> bool {
                true
            }

            fn opened(&self) -> u64 {
                1
            }

            fn transactions(&self) -> u64 {
                self.index.transactions()
            }
        }
    };
}

operations!(shared {});

/// How the object store behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    Works,
    Fails,
    Hangs,
}

/// An object store in memory that fails on demand.
#[derive(Debug)]
pub(super) struct Flaky {
    objects: InMemory,
    pub(super) mode: Mutex<Mode>,
    /// Number of operations that fail before the rest follow the mode.
    pub(super) failing: AtomicUsize,
}

impl Flaky {
    pub(super) fn set(&self, mode: Mode) {
        *self.mode.lock().expect("the mode") = mode;
    }

    async fn reach(&self) -> object_store::Result<()> {
        let is_failing = self.is_failing();
        let mode = *self.mode.lock().expect("the mode");
        match mode {
            Mode::Works if !is_failing => Ok(()),
            Mode::Hangs => std::future::pending().await,
            _ => Err(injected()),
        }
    }

    /// Returns whether this operation is one of those that fail, and counts it.
    fn is_failing(&self) -> bool {
        self.failing.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}

fn injected() -> object_store::Error {
    object_store::Error::Generic { store: "flaky", source: "injected".into() }
}

impl fmt::Display for Flaky {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("flaky object store")
    }
}

#[async_trait]
impl ObjectStore for Flaky {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        self.reach().await?;
        self.objects.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.objects.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> object_store::Result<GetResult> {
        self.reach().await?;
        self.objects.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<Path>>,
    ) -> BoxStream<'static, object_store::Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        if self.is_failing() {
            return Box::pin(futures_util::stream::iter([Err(injected())]));
        }
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> object_store::Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> object_store::Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

/// Two servers, the first of which sweeps.
pub(super) struct Servers {
    pub(super) stores: [Store; 2],
    pub(super) indexes: [Arc<Shared>; 2],
    pub(super) objects: Arc<Flaky>,
}

impl Servers {
    pub(super) async fn start() -> Self {
        Self::with(StoreOptions::new(Location::Memory)).await
    }

    pub(super) async fn with(options: StoreOptions) -> Self {
        // The index of a store that is dropped at once.
        let index = Arc::clone(&open(Location::Memory).await.inner.index);
        let (common, objects) = (Arc::new(Common::default()), InMemory::new());
        let objects = Arc::new(Flaky { objects, mode: Mutex::new(Mode::Works), failing: AtomicUsize::new(0) });
        let indexes = [0, 1].map(|server| {
            Arc::new(Shared {
                index: Arc::clone(&index),
                common: Arc::clone(&common),
                server,
                is_down: AtomicBool::new(false),
                breaks: AtomicBool::new(false),
                arrived: Notify::new(),
                hanging: Mutex::new(""),
                gate: tokio::sync::Mutex::new(()),
            })
        });
        let stores = indexes.each_ref().map(|index| {
            Store::over(Arc::clone(index) as _, Arc::clone(&objects) as _, options.clone(), Arc::new(Tokens))
        });
        Self { stores, indexes, objects }
    }
}

/// Waits until a condition holds.
pub(super) async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..4000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("timed out waiting for {what}");
}
