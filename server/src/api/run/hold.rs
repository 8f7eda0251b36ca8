//! The record of a stream, as its holder may change it: only as long as no other server has taken the stream over.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use crate::session::{Owner, Store, StoreError};

/// A stream that this server holds, or has held.
pub(super) struct Hold {
    store: Store,
    owner: Owner,
    id: String,
    /// Whether the record was withdrawn.
    withdrawn: OnceCell<bool>,
}

impl Hold {
    pub(super) fn new(store: Store, owner: Owner, id: String) -> Arc<Self> {
        Arc::new(Self { store, owner, id, withdrawn: OnceCell::new() })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    /// Removes the record, after which no other server can compute the events; false if one may do so already. The run and
    /// the client that ends it both ask, and get the same answer.
    pub(super) async fn withdraw(&self) -> Result<bool, StoreError> {
        self.withdrawn.get_or_try_init(|| self.store.withdraw_stream(self.owner, &self.id)).await.copied()
    }

    /// Whether the record was removed.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn.get() == Some(&true)
    }

    /// Keeps the record of a stream that has ended for so long, so that other servers can still send its events.
    pub(super) async fn keep(&self, kept: Duration) -> Result<(), StoreError> {
        self.store.keep_stream(self.owner, &self.id, kept).await
    }

    /// Gives the stream up for another server, with another record if one is given.
    pub(super) async fn release(&self, record: Option<Vec<u8>>) {
        self.store.release_stream(self.owner, &self.id, record).await;
    }
}
