//! Stored responses, each with the snapshot that it ended in, and receipts: answers kept for a request made again.

use std::sync::Arc;

use super::{Inner, ReceiptKey, Store, Tier, detached, now};
use crate::session::index::{Fault, ResponseRow, VersionRow};
use crate::session::{Owner, ResponseId, Snapshot, StoreError, VersionId};

/// What the version of a response is called.
const RESPONSE: &str = "response";

impl Store {
    /// Keeps a response and the snapshot that it ended in, and the receipt with it.
    ///
    /// # Errors
    /// A quota or the disk is full, or the disk fails.
    pub async fn put_response(
        &self,
        owner: Owner,
        id: &ResponseId,
        body: Vec<u8>,
        snapshot: Arc<Snapshot>,
        parent: Option<VersionId>,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
    ) -> Result<(), StoreError> {
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        detached(async move {
            let version = VersionId::new();
            let prepared = inner.prepare(owner, &version, &snapshot, None).await?;
            let ends = now().saturating_add(inner.options.response_ttl.as_millis() as u64);
            let row = ResponseRow { owner, version: version.as_str().to_owned(), ends, body };
            let receipt_ends = now().saturating_add(inner.options.receipt_ttl.as_millis() as u64);
            let (name, has_object) = (id.clone(), prepared.row.seed.is_none());
            let kept = inner.writer.run(move |write| {
                let parent = parent.as_ref().map(|parent| parent.as_str().to_owned());
                let about = VersionRow { parent, kind: RESPONSE.to_owned(), ..prepared.row.clone() };
                write.put_response(name.as_str(), &row, &about)?;
                if let Some((ReceiptKey(key), answer)) = &receipt {
                    write.put_receipt(owner, key, receipt_ends, answer)?;
                }
                write.settle(prepared.reservation.as_ref());
                Ok(())
            });
            if let Err(error) = kept.await {
                let failed = matches!(error, StoreError::Unavailable { .. } | StoreError::Full { .. });
                // It may have reached the disk before the disk failed.
                if !(failed && inner.response(owner, &id).await.is_ok()) {
                    return Err(inner.abandon(&version, error).await);
                }
            }
            if has_object {
                inner.remember(&version, &snapshot);
            }
            Ok(())
        })
        .await
    }

    /// A response, and the version of its snapshot.
    ///
    /// # Errors
    /// There is no such response.
    pub async fn response(&self, owner: Owner, id: &ResponseId) -> Result<(Vec<u8>, VersionId), StoreError> {
        let row = self.inner.response(owner, id).await?;
        let version = super::version_id(&row.version)?;
        Ok((row.body, version))
    }

    /// The snapshot that a response ended in.
    ///
    /// # Errors
    /// There is no such response, or its object cannot be read.
    pub async fn response_snapshot(&self, owner: Owner, id: &ResponseId) -> Result<(Arc<Snapshot>, Tier), StoreError> {
        let version = self.response(owner, id).await?.1;
        let row = self.inner.version_row(owner, &version).await?;
        self.inner.fetch(&version, &row).await
    }

    /// Removes a response, and its snapshot where nothing else keeps it.
    ///
    /// # Errors
    /// There is no such response, or the disk fails.
    pub async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        self.inner.response(owner, id).await?;
        let id = id.clone();
        let removed = self.inner.free(move |write| {
            let row = write.tables.response(owner, id.as_str())?;
            write.remove_response(id.as_str(), &row)
        });
        removed.await
    }

    /// The answer kept under a key, if there is one.
    ///
    /// # Errors
    /// The disk fails.
    pub async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let key = key.to_owned();
        let found = self.inner.read(move |tables| tables.receipt(owner, &key)).await?;
        Ok(found.filter(|(ends, _)| *ends > now()).map(|(_, answer)| answer))
    }

    /// Keeps an answer under a key, for a request that no turn belongs to.
    ///
    /// # Errors
    /// The disk is full or fails.
    pub async fn put_receipt(&self, owner: Owner, key: &str, answer: Vec<u8>) -> Result<(), StoreError> {
        let key = key.to_owned();
        self.inner.ballast().await?;
        let ends = now().saturating_add(self.inner.options.receipt_ttl.as_millis() as u64);
        self.inner.writer.run(move |write| write.put_receipt(owner, &key, ends, &answer)).await
    }
}

impl Inner {
    /// An owner's response whose time is not over.
    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError> {
        let id = id.clone();
        let read = move |tables: &super::Tables<super::Reading>| {
            let row = tables.response(owner, id.as_str())?;
            if row.ends <= now() { Err(Fault::Refused(StoreError::RESPONSE)) } else { Ok(row) }
        };
        self.read(read).await
    }
}
