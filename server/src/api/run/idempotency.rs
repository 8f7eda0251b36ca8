//! Idempotency keys: a retry gets the first result again, and nothing happens twice.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::api::error::ApiError;
use crate::session::{Owner, ReceiptKey, hex};

/// The keys whose first requests are running.
#[derive(Clone, Default)]
pub(in crate::api) struct InFlight(Arc<Mutex<HashSet<(Owner, String)>>>);

/// Reserves a key for the first request with it, until dropped.
pub(in crate::api) struct Ticket {
    in_flight: InFlight,
    owner: Owner,
    key: String,
    digest: String,
}

/// The digest of a request, which shows whether a key is used for a different request.
pub(super) struct RequestDigest(String);

impl RequestDigest {
    /// Computes the digest of a request to `path`.
    pub(super) fn of(path: &str, body: &[u8]) -> Self {
        Self(hex(&Sha256::new().chain_update(path).chain_update([0]).chain_update(body).finalize()))
    }
}

/// The stored result of the first request with a key.
#[derive(Serialize, Deserialize)]
struct Receipt {
    /// The digest of the request.
    digest: String,
    body: String,
}

impl InFlight {
    /// Reserves `key` for a request. Refuses a key that another running request has.
    pub(super) fn begin(&self, owner: Owner, key: &str, request: RequestDigest) -> Result<Ticket, ApiError> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.insert((owner, key.to_owned())) {
            let message = "a request with this idempotency-key is running; retry when it has ended";
            let param = Some("idempotency-key");
            return Err(ApiError::request(StatusCode::CONFLICT, param, Some("idempotency_key_in_use"), message));
        }
        Ok(Ticket { in_flight: self.clone(), owner, key: key.to_owned(), digest: request.0 })
    }
}

impl Ticket {
    /// Returns the body of the first response from `receipt`. Refuses a receipt of a different request.
    pub(super) fn first_body(&self, receipt: &[u8]) -> Result<String, ApiError> {
        let receipt: Receipt = serde_json::from_slice(receipt).map_err(|_| ApiError::internal())?;
        if receipt.digest == self.digest {
            return Ok(receipt.body);
        }
        let message = "this idempotency-key was used for another request";
        let (status, param) = (StatusCode::UNPROCESSABLE_ENTITY, Some("idempotency-key"));
        Err(ApiError::request(status, param, Some("idempotency_key_reused"), message))
    }

    /// Returns the receipt to store for a first result.
    pub(in crate::api) fn receipt(&self, body: String) -> (ReceiptKey, Vec<u8>) {
        (ReceiptKey(self.key.clone()), receipt(self.digest.clone(), body))
    }

    /// Like [`Self::receipt`], for a result that describes what the transaction is about to create.
    pub(in crate::api) fn promise<T: ?Sized>(
        &self,
        body: impl Fn(&T) -> String + Send + Sync + 'static,
    ) -> crate::session::Receipt<T> {
        let digest = self.digest.clone();
        (ReceiptKey(self.key.clone()), Box::new(move |made| receipt(digest.clone(), body(made))))
    }
}

fn receipt(digest: String, body: String) -> Vec<u8> {
    serde_json::to_vec(&Receipt { digest, body }).expect("two strings can be serialised")
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut keys = self.in_flight.0.lock().unwrap_or_else(PoisonError::into_inner);
        keys.remove(&(self.owner, std::mem::take(&mut self.key)));
    }
}
