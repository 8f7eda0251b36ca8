//! The record of a stream, for the server that holds it. The holder may change the record only while no other server
//! has taken over the stream.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use crate::session::{Owner, Store, StoreError};

/// A stream that this server holds, or has held.
pub(super) struct Hold {
    store: Store,
    owner: Owner,
    id: String,
    /// The outcome of [`Self::withdraw`], once it has succeeded.
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

    /// Removes the record, so that no other server can compute the events. Returns false if one may already do so. The
    /// run and the client that ends it both call this, and get the same answer.
    pub(super) async fn withdraw(&self) -> Result<bool, StoreError> {
        self.withdrawn.get_or_try_init(|| self.store.withdraw_stream(self.owner, &self.id)).await.copied()
    }

    /// Whether the record was removed.
    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn.get() == Some(&true)
    }

    /// Keeps the record of an ended stream for the time `kept`, so that other servers can still send its events.
    pub(super) async fn keep(&self, kept: Duration) -> Result<(), StoreError> {
        self.store.keep_stream(self.owner, &self.id, kept).await
    }

    /// Gives up the stream for another server, and replaces the record if one is given.
    pub(super) async fn release(&self, record: Option<Vec<u8>>) {
        self.store.release_stream(self.owner, &self.id, record).await;
    }
}
