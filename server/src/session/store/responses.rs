//! Stored responses, each with the snapshot at its end, and receipts for repeated requests.

use std::borrow::Borrow;
use std::sync::Arc;

use super::inner::{Inner, Store, detached, now, version_id};
use super::load::Prepared;
use super::outcome::is_unknown;
use super::types::{NewResponse, Receipt, ReceiptKey, Tier};
use crate::session::error::StoreError;
use crate::session::id::{Owner, ResponseId, VersionId};
use crate::session::index::{self, Answer, Forks, NewReceipt, Reservation, ResponseRow, VersionRow, receipt_bytes};
use crate::session::patch::Metadata;
use crate::session::snapshot::Snapshot;

/// The kind of a response's version.
const RESPONSE: &str = "response";

/// Maximum bytes of a session in a receipt, without its metadata.
const SESSION_IN_RECEIPT: usize = 1024;

impl Store {
    /// Stores a response with the snapshot at its end, and a receipt.
    ///
    /// # Errors
    /// A quota or the disk is full, or the disk fails.
    pub async fn put_response(
        &self,
        owner: Owner,
        id: &ResponseId,
        new: NewResponse,
        receipt: Option<(ReceiptKey, Vec<u8>)>,
    ) -> Result<(), StoreError> {
        let NewResponse { body, snapshot, parent, text } = new;
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        detached(async move {
            let version = VersionId::new();
            let _room = inner.admit_receipt(owner, receipt.as_ref()).await?;
            let text = inner.prepare_text(owner, text.as_ref(), None).await?;
            let Prepared { version: mut described, upload } = inner.prepare(owner, &version, &snapshot, None).await?;
            let parent = parent.map(|parent| parent.as_str().to_owned());
            described.row = VersionRow { parent, kind: RESPONSE.to_owned(), ..described.row };
            described.add_text(text);
            let ends = now().saturating_add(inner.options.response_ttl.as_millis() as u64);
            let row = ResponseRow { owner, version: version.as_str().to_owned(), ends, body };
            let has_object = described.row.seed.is_none();
            let receipt = receipt.map(|receipt| inner.kept_receipt(receipt));
            let new = index::NewResponse { id: id.clone(), row, version: described, receipt };
            let stored = inner.index.put_response(new).await;
            drop(upload);
            if let Err(error) = stored {
                // The transaction may have been carried out before the failure.
                if !(is_unknown(&error) && inner.repeated(|| inner.response(owner, &id)).await.is_ok()) {
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

    /// Returns a response's body, and the version of its snapshot.
    ///
    /// # Errors
    /// The response does not exist.
    pub async fn response(&self, owner: Owner, id: &ResponseId) -> Result<(Vec<u8>, VersionId), StoreError> {
        let row = self.inner.response(owner, id).await?;
        let version = version_id(&row.version)?;
        Ok((row.body, version))
    }

    /// Returns the snapshot at the end of a response.
    ///
    /// # Errors
    /// The response does not exist, or its object cannot be read.
    pub async fn response_snapshot(&self, owner: Owner, id: &ResponseId) -> Result<(Arc<Snapshot>, Tier), StoreError> {
        let version = self.response(owner, id).await?.1;
        let row = self.inner.version_row(owner, &version).await?;
        self.inner.fetch(&version, &row).await
    }

    /// Removes a response, and its snapshot if nothing else keeps it.
    ///
    /// # Errors
    /// The response does not exist, or the disk fails.
    pub async fn delete_response(&self, owner: Owner, id: &ResponseId) -> Result<(), StoreError> {
        self.inner.response(owner, id).await?;
        self.inner.index.delete_response(owner, id).await
    }

    /// Returns the answer stored under a key, unless it has expired.
    ///
    /// # Errors
    /// The disk fails.
    pub async fn receipt(&self, owner: Owner, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.inner.index.receipt(owner, key).await?;
        Ok(found.filter(|(ends, _)| *ends > now()).map(|(_, answer)| answer))
    }

    /// Stores an answer under a key, for a request that is not a turn.
    ///
    /// # Errors
    /// A quota or the disk is full, or the disk fails.
    pub async fn put_receipt(&self, owner: Owner, key: &str, answer: Vec<u8>) -> Result<(), StoreError> {
        self.inner.index.ready().await?;
        let _room = self.inner.admit(owner, receipt_bytes(key, &answer)).await?;
        let receipt = self.inner.kept_receipt((ReceiptKey(key.to_owned()), answer));
        self.inner.index.put_receipt(owner, receipt).await
    }
}

impl Inner {
    /// Reserves space for a receipt until it is in the index.
    pub(super) async fn admit_receipt(
        self: &Arc<Self>,
        owner: Owner,
        receipt: Option<&(ReceiptKey, Vec<u8>)>,
    ) -> Result<Option<Reservation>, StoreError> {
        match receipt {
            Some((ReceiptKey(key), answer)) => self.admit(owner, receipt_bytes(key, answer)).await.map(Some),
            None => Ok(None),
        }
    }

    /// Reserves space for a receipt that describes `n` sessions, before its size is known.
    pub(super) async fn admit_receipt_of(
        self: &Arc<Self>,
        owner: Owner,
        n: usize,
        metadata: &Metadata,
    ) -> Result<Reservation, StoreError> {
        let metadata: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
        self.admit(owner, n.saturating_mul(SESSION_IN_RECEIPT + 2 * metadata) as u64).await
    }

    /// Returns an owner's response, unless it has expired.
    async fn response(&self, owner: Owner, id: &ResponseId) -> Result<ResponseRow, StoreError> {
        let row = self.index.response(owner, id).await?;
        if row.ends <= now() { Err(StoreError::RESPONSE) } else { Ok(row) }
    }

    /// Returns a receipt to store, with its answer.
    pub(super) fn kept_receipt(&self, (ReceiptKey(key), answer): (ReceiptKey, Vec<u8>)) -> NewReceipt<Vec<u8>> {
        NewReceipt { key, now: now(), ends: self.receipt_expiry(), answer }
    }

    /// Returns a receipt to store, whose answer is made from the sessions that the transaction creates.
    pub(super) fn receipt_of<T: ?Sized + 'static, M: Borrow<T>>(
        &self,
        (ReceiptKey(key), answer): Receipt<T>,
        made: impl Fn(&Forks) -> Result<M, StoreError> + Send + Sync + 'static,
    ) -> NewReceipt<Answer> {
        let answer = Answer(Arc::new(move |forks| Ok(answer(made(forks)?.borrow()))));
        NewReceipt { key, now: now(), ends: self.receipt_expiry(), answer }
    }
}
