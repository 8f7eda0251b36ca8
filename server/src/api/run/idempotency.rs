//! Requests that are sent again: the first result is given again, and nothing happens twice.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::state::AppState;
use crate::session::{Owner, ReceiptKey, hex};

/// Longest key that is taken.
const MAX_KEY_BYTES: usize = 255;

/// The keys whose first requests are running.
#[derive(Clone, Default)]
pub(in crate::api) struct InFlight(Arc<Mutex<HashSet<(Owner, String)>>>);

/// The right to be the first request with a key; given back when it is dropped.
pub(in crate::api) struct Ticket {
    in_flight: InFlight,
    owner: Owner,
    key: String,
    digest: String,
}

/// What is kept of a first result.
#[derive(Serialize, Deserialize)]
struct Receipt {
    /// Of the request, so that a key is not used for two.
    digest: String,
    body: String,
}

/// What a request with a key is.
pub(in crate::api) enum Attempt {
    /// It has no key.
    Unmarked,
    /// The first.
    First(Ticket),
    /// Sent again: this was the first's result.
    Again(String),
}

/// Looks a request up by its `Idempotency-Key`.
pub(in crate::api) async fn attempt(
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
    path: &str,
    body: &[u8],
) -> Result<Attempt, ApiError> {
    let Some(key) = headers.get("idempotency-key") else { return Ok(Attempt::Unmarked) };
    // A receipt has the text of the answer in it, and stays.
    context::check_may_store("idempotency-key")?;
    let plain = |key: &&str| (1..=MAX_KEY_BYTES).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
    let Some(key) = key.to_str().ok().filter(plain) else {
        let message = format!("idempotency-key must be 1 to {MAX_KEY_BYTES} printable ASCII characters");
        return Err(ApiError::invalid(Some("idempotency-key"), message));
    };
    let digest = Sha256::new().chain_update(path).chain_update([0]).chain_update(body).finalize();
    let ticket = state.in_flight().begin(owner, key, hex(&digest))?;
    let Some(receipt) = state.store()?.receipt(owner, key).await? else { return Ok(Attempt::First(ticket)) };
    let receipt: Receipt = serde_json::from_slice(&receipt).map_err(|_| ApiError::internal())?;
    if receipt.digest != ticket.digest {
        let message = "this idempotency-key was used for another request";
        let (status, param) = (StatusCode::UNPROCESSABLE_ENTITY, Some("idempotency-key"));
        return Err(ApiError::request(status, param, Some("idempotency_key_reused"), message));
    }
    Ok(Attempt::Again(receipt.body))
}

impl InFlight {
    fn begin(&self, owner: Owner, key: &str, digest: String) -> Result<Ticket, ApiError> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !keys.insert((owner, key.to_owned())) {
            let message = "a request with this idempotency-key is running; try again when it has ended";
            let param = Some("idempotency-key");
            return Err(ApiError::request(StatusCode::CONFLICT, param, Some("idempotency_key_in_use"), message));
        }
        Ok(Ticket { in_flight: self.clone(), owner, key: key.to_owned(), digest })
    }
}

impl Ticket {
    /// What is to be kept of the first result.
    pub(in crate::api) fn receipt(&self, body: &str) -> (ReceiptKey, Vec<u8>) {
        (ReceiptKey(self.key.clone()), kept(self.digest.clone(), body.to_owned()))
    }

    /// The same of a result that tells of what is still to be made.
    pub(in crate::api) fn promise<T: ?Sized>(
        &self,
        body: impl Fn(&T) -> String + Send + 'static,
    ) -> crate::session::Receipt<T> {
        let digest = self.digest.clone();
        (ReceiptKey(self.key.clone()), Box::new(move |made| kept(digest.clone(), body(made))))
    }
}

fn kept(digest: String, body: String) -> Vec<u8> {
    // Two strings: there is nothing in them that JSON cannot say.
    serde_json::to_vec(&Receipt { digest, body }).unwrap_or_default()
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut keys = self.in_flight.0.lock().unwrap_or_else(PoisonError::into_inner);
        keys.remove(&(self.owner, std::mem::take(&mut self.key)));
    }
}
