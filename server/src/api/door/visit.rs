//! One request that was let in with a key: whose it is, the place that it takes, and what it costs.

use std::future::Future;
use std::sync::Arc;

use axum::http::StatusCode;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

use super::keys::Key;
use super::scope::Scope;
use crate::api::error::ApiError;
use crate::session::Owner;

tokio::task_local! {
    /// The visit of the request that the task serves.
    static VISIT: Arc<Visit>;
}

/// A request that was let in. Its key's place is free again when the last who holds it is gone: the handler, and the
/// run that goes on after it.
pub(in crate::api) struct Visit {
    key: Arc<Key>,
    owner: Owner,
    _place: Option<OwnedSemaphorePermit>,
}

impl Visit {
    pub(super) fn new(key: Arc<Key>, place: Option<OwnedSemaphorePermit>) -> Self {
        // Of the name alone: a key that is exchanged for another keeps what is its own.
        let digest = Sha256::new().chain_update("tidegate key\0").chain_update(key.name()).finalize();
        let mut owner = [0; 16];
        owner.copy_from_slice(&digest[..16]);
        Self { key, owner: Owner(owner), _place: place }
    }

    /// Whose the request is.
    pub(in crate::api) fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether its key opens what the server keeps.
    fn may_keep(&self) -> bool {
        self.key.has(Scope::Sessions)
    }

    /// Takes tokens that were read or made from the key's budget.
    pub(in crate::api) fn charge(&self, tokens: usize) {
        self.key.limits().charge(tokens);
    }
}

/// Serves a request as `visit`.
pub(super) async fn scope<F: Future>(visit: Arc<Visit>, serving: F) -> F::Output {
    VISIT.scope(visit, serving).await
}

/// The visit that this task serves; none where the server has no keys. Handlers ask here, so that no format of
/// requests has to hand it on.
pub(in crate::api) fn current() -> Option<Arc<Visit>> {
    VISIT.try_with(Arc::clone).ok()
}

/// Whether what the request makes may be kept for later ones: where the server has keys, that takes a scope.
pub(in crate::api) fn may_keep() -> bool {
    current().is_none_or(|visit| visit.may_keep())
}

/// Refuses `param`, which asks for something that is kept, where the key does not open that.
pub(in crate::api) fn check_keep(param: &str) -> Result<(), ApiError> {
    if may_keep() {
        return Ok(());
    }
    let message = format!("{param} must be absent: this API key has not the scope `{}`", Scope::Sessions);
    Err(ApiError::request(StatusCode::FORBIDDEN, Some(param), Some("insufficient_scope"), message))
}
