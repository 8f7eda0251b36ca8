//! Streams shared by several servers: a server records a request, so that another server can compute its stream again.

use std::time::Duration;

use super::inner::{Store, now};
use crate::session::error::StoreError;
use crate::session::id::Owner;
use crate::session::index::{NewStream, StreamRow};

impl Store {
    /// Returns whether other servers use the store at the same time.
    pub fn is_shared(&self) -> bool {
        self.inner.index.is_shared()
    }

    /// Stores the record of a stream for the duration `kept`, replacing any earlier record. This server becomes the
    /// stream's holder.
    ///
    /// # Errors
    /// The index fails.
    pub async fn put_stream(&self, owner: Owner, id: &str, record: Vec<u8>, kept: Duration) -> Result<(), StoreError> {
        let ends = now().saturating_add(kept.as_millis() as u64);
        self.inner.index.put_stream(NewStream { id: id.to_owned(), row: StreamRow { owner, record }, ends }).await
    }

    /// Returns the record of a stream.
    ///
    /// # Errors
    /// The stream does not exist, or the index fails.
    pub async fn stream(&self, owner: Owner, id: &str) -> Result<Vec<u8>, StoreError> {
        Ok(self.inner.index.stream(owner, id).await?.record)
    }

    /// Makes this server the holder of a stream; returns false if another live server holds it.
    ///
    /// # Errors
    /// The stream does not exist, or the index fails.
    pub async fn take_stream(&self, owner: Owner, id: &str) -> Result<bool, StoreError> {
        self.inner.index.take_stream(owner, id).await
    }

    /// Releases a stream, so that another server can take it at once. Replaces the record if a new one is given.
    pub async fn release_stream(&self, owner: Owner, id: &str, record: Option<Vec<u8>>) {
        self.inner.index.release_stream(owner, id, record).await;
    }

    /// Keeps the record of an ended stream for the duration `kept` and releases the stream, if this server is its
    /// holder.
    ///
    /// # Errors
    /// The index fails.
    pub async fn keep_stream(&self, owner: Owner, id: &str, kept: Duration) -> Result<(), StoreError> {
        self.inner.index.keep_stream(owner, id, now().saturating_add(kept.as_millis() as u64)).await
    }

    /// Removes the record of a stream if this server is its holder; returns false if it is not.
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
