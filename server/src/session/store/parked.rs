//! Parked snapshots: when a server hands over a turn in the middle of generation, the server that continues it reads
//! the snapshot from here. The index does not name them. The sweep removes any that nobody else removes, like other
//! leftovers of a dead server.

use std::sync::Arc;

use super::inner::Store;
use crate::session::blocking::blocking;
use crate::session::error::StoreError;
use crate::session::id::VersionId;
use crate::session::snapshot::Snapshot;

impl Store {
    /// Stores a snapshot; returns its id and its size in bytes. The snapshot is kept for at least an hour.
    ///
    /// # Errors
    /// The object store fails.
    pub async fn park(&self, snapshot: &Arc<Snapshot>) -> Result<(VersionId, u64), StoreError> {
        let (inner, id) = (&self.inner, VersionId::new());
        let object = inner.encode(snapshot).await?;
        let bytes = object.len() as u64;
        inner.objects.put(&id, object).await.inspect_err(|_| inner.suspect(&id))?;
        Ok((id, bytes))
    }

    /// Reads a parked snapshot; returns `None` if it is gone or cannot be read.
    ///
    /// # Errors
    /// The object store fails.
    pub async fn parked(&self, id: &VersionId, bytes: u64) -> Result<Option<Arc<Snapshot>>, StoreError> {
        let (codec, version) = (Arc::clone(&self.inner.codec), id.clone());
        let read = async {
            let Some(object) = self.inner.objects.get(id, bytes).await? else { return Ok(None) };
            let decode = move || codec.decode(&object).map_err(|reason| StoreError::Corrupt { version, reason });
            blocking(decode).await.map(|snapshot| Some(Arc::new(snapshot)))
        };
        match read.await {
            Err(error @ StoreError::Corrupt { .. }) => {
                tracing::warn!(%error, "a parked turn cannot be read");
                Ok(None)
            }
            found => found,
        }
    }

    /// Removes a parked snapshot that nobody needs any more.
    pub async fn remove_parked(&self, id: &VersionId) {
        drop(self.inner.objects.delete(vec![id.clone()]).await);
    }
}
