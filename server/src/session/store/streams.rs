//! Streams that several servers share: what a server records of a request, so that another one can compute its stream again.

use std::time::Duration;

use super::inner::{Store, now};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{NewStream, StreamRow};

impl Store {
    /// Whether other servers use the store at the same time.
    pub fn is_shared(&self) -> bool {
        self.inner.index.is_shared()
    }

    /// Records a stream for so long, in place of an earlier record. This server is then its holder.
    ///
    /// # Errors
    /// The index fails.
    pub async fn put_stream(&self, owner: Owner, id: &str, record: Vec<u8>, kept: Duration) -> Result<(), StoreError> {
        let ends = now().saturating_add(kept.as_millis() as u64);
        self.inner.index.put_stream(NewStream { id: id.to_owned(), row: StreamRow { owner, record }, ends }).await
    }

    /// What is recorded of a stream.
    ///
    /// # Errors
    /// No such stream, or the index fails.
    pub async fn stream(&self, owner: Owner, id: &str) -> Result<Vec<u8>, StoreError> {
        Ok(self.inner.index.stream(owner, id).await?.record)
    }

    /// Makes this server the holder of a stream; false if another server that is alive is.
    ///
    /// # Errors
    /// No such stream, or the index fails.
    pub async fn take_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.inner.index.take_stream(owner, id).await
    }

    /// Gives a stream up, so that another server can take it at once, with another record if one is given.
    pub async fn release_stream(&self, owner: Owner, id: &str, record: Option<Vec<u8>>) {
        self.inner.index.release_stream(owner, id, record).await;
    }

    /// Keeps the record of a stream that has ended for so long, and gives the stream up, if this server is its holder.
    ///
    /// # Errors
    /// The index fails.
    pub async fn keep_stream(&self, owner: Owner, id: &str, kept: Duration) -> Result<(), StoreError> {
        self.inner.index.keep_stream(owner, id, now().saturating_add(kept.as_millis() as u64)).await
    }

    /// Removes the record of a stream if this server is its holder; false if it is not.
    ///
    /// # Errors
    /// The index fails.
    pub async fn withdraw_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.inner.index.withdraw_stream(owner, id).await
    }

    /// Removes the record of a stream, if there is one.
    ///
    /// # Errors
    /// The index fails.
    pub async fn delete_stream(&self, owner: Owner, id: &str) -> Result<(), StoreError> {
        self.inner.index.delete_stream(owner, id).await
    }
}
