//! An index that measures its operations.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;

use super::backend::Backend;
use super::error::StoreError;
use super::id::{Owner, ResponseId, SessionId, VersionId};
use super::index::{
    Capacity, Commit, Create, Edit, Edited, Exempt, Fork, Forks, Head, Index, Listed, Missing, NewReceipt, NewResponse,
    NewStream, ResponseRow, Rewind, SessionRow, StreamRow, VersionRow, Victims,
};

/// Calls a macro with the operations in braces, followed by the operations of [`Index`] that every wrapper treats
/// alike. Each operation has a kind, a name, arguments and a result.
macro_rules! operations {
    ($to:ident { $($more:tt)* }) => {
        $to! {
            $($more)*
            "read" session(owner: Owner, id: &SessionId) -> SessionRow;
            "read" head(owner: Owner, id: &SessionId) -> Head;
            "read" list(owner: Owner, after: Option<u64>, newest_first: bool, limit: usize) -> Vec<(SessionId, Head)>;
            "read" versions(owner: Owner, id: &SessionId) -> (SessionRow, Vec<Listed>);
            "read" listed(owner: Owner, id: &SessionId, version: Option<&VersionId>) -> Listed;
            "read" version(owner: Owner, id: &VersionId) -> Option<VersionRow>;
            "read" chain(owner: Owner, id: &str, limit: usize) -> Vec<(String, VersionRow)>;
            "read" text(version: &str, bytes: usize) -> Vec<(String, Vec<u8>)>;
            "read" response(owner: Owner, id: &ResponseId) -> ResponseRow;
            "read" receipt(owner: Owner, key: &str) -> Option<(u64, Vec<u8>)>;
            "read" can_sweep(now: u64, exempt: Exempt) -> bool;
            "read" can_evict(victims: Victims, missing: u64) -> bool;
            "read" may_create(owner: Owner, id: Option<&SessionId>, max_sessions: usize) -> ();
            "read" may_fork(owner: Owner, from: (&SessionId, &VersionId), n: usize, max_sessions: usize) -> ();
            "write" create(create: Create) -> Head;
            "write" rewind(rewind: Rewind) -> Head;
            "write" fork(fork: Fork) -> Forks;
            "write" edit(owner: Owner, id: &SessionId, edit: Edit, now: u64) -> Edited;
            "write" delete(owner: Owner, id: &SessionId) -> ();
            "write" record_uses(uses: HashMap<SessionId, u64>) -> ();
            "write" put_response(response: NewResponse) -> ();
            "write" delete_response(owner: Owner, id: &ResponseId) -> ();
            "write" put_receipt(owner: Owner, receipt: NewReceipt<Vec<u8>>) -> ();
            "sweep" expire(now: u64, exempt: Exempt) -> usize;
            "sweep" prune_texts() -> usize;
            "sweep" evict(victims: Victims, missing: u64, lineage: usize) -> Option<usize>;
            "sweep" garbage(limit: usize) -> Vec<VersionId>;
            "sweep" forget_garbage(ids: Vec<VersionId>) -> ();
            "sweep" missing(objects: HashSet<String>) -> Missing;
        }
    };
}
#[cfg(test)]
pub(crate) use operations;

/// The kinds of operations.
const OPERATIONS: [&str; 6] = ["read", "commit", "write", "lease", "stream", "sweep"];

/// An index, and the latencies of its operations.
#[derive(Debug)]
pub(crate) struct Measured {
    index: Arc<dyn Index>,
    times: Arc<Backend>,
}

impl Measured {
    pub(crate) fn new(index: Arc<dyn Index>) -> Self {
        Self { index, times: Backend::new("the index", &OPERATIONS, false) }
    }

    /// Returns the latencies of the operations.
    pub(crate) fn times(&self) -> &Arc<Backend> {
        &self.times
    }
}

/// Implements [`Index`] for [`Measured`].
macro_rules! measured {
    ($($kind:literal $name:ident($($argument:ident: $of:ty),*) -> $result:ty;)*) => {
        #[async_trait]
        impl Index for Measured {
            $(
                async fn $name(&self, $($argument: $of),*) -> Result<$result, StoreError> {
                    self.times.run($kind, None, self.index.$name($($argument),*)).await
                }
            )*

            async fn ready(&self) -> Result<(), StoreError> {
                self.index.ready().await
            }

            fn failure(&self) -> Option<StoreError> {
                self.index.failure()
            }

            async fn release(&self, session: &SessionId) {
                self.index.release(session).await;
            }

            async fn release_stream(&self, owner: Owner, id: &str, record: Option<Vec<u8>>) {
                self.index.release_stream(owner, id, record).await;
            }

            async fn flush(&self) -> Result<(), StoreError> {
                self.index.flush().await
            }

            async fn close(&self) -> Result<(), StoreError> {
                self.index.close().await
            }

            fn capacity(&self) -> &Capacity {
                self.index.capacity()
            }

            fn names_all(&self) -> bool {
                self.index.names_all()
            }

            fn is_shared(&self) -> bool {
                self.index.is_shared()
            }

            fn opened(&self) -> u64 {
                self.index.opened()
            }

            fn transactions(&self) -> u64 {
                self.index.transactions()
            }
        }
    };
}

operations!(measured {
    "commit" commit(commit: Commit) -> Head;
    "lease" lease(session: &SessionId) -> bool;
    "lease" leads() -> bool;
    "stream" put_stream(stream: NewStream) -> ();
    "stream" stream(owner: Owner, id: &str) -> StreamRow;
    "stream" take_stream(owner: Owner, id: &str) -> bool;
    "stream" keep_stream(owner: Owner, id: &str, ends: u64) -> ();
    "stream" withdraw_stream(owner: Owner, id: &str) -> bool;
    "stream" delete_stream(owner: Owner, id: &str) -> ();
    "sweep" orphans(ids: Vec<VersionId>) -> Vec<VersionId>;
});
