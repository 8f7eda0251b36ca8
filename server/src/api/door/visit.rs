//! One request that was let in with a key: whose it is, the place that it takes, and what it costs.

use std::future::Future;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

use super::keys::Key;
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
