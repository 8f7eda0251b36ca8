//! The key behind a request: its owner, its permit among the key's concurrent requests, and the tokens that it is charged.

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
    static CONTEXT: Arc<AuthContext>;
}

/// An authenticated request. The permit is released when the last holder drops it: the handler, or a run that outlives
/// the handler.
pub(in crate::api) struct AuthContext {
    key: Arc<Key>,
    owner: Owner,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AuthContext {
    pub(super) fn new(key: Arc<Key>, permit: Option<OwnedSemaphorePermit>) -> Self {
        // The name alone: a key that is replaced under its name keeps its sessions.
        let digest = Sha256::new().chain_update("tidegate key\0").chain_update(key.name()).finalize();
        let mut owner = [0; 16];
        owner.copy_from_slice(&digest[..16]);
        Self { key, owner: Owner(owner), _permit: permit }
    }

    /// The owner of what the request reads and creates.
    pub(in crate::api) fn owner(&self) -> Owner {
        self.owner
    }

    fn may_store(&self) -> bool {
        self.key.has(Scope::Sessions)
    }

    /// Deducts prompt or completion tokens from the key's quota.
    pub(in crate::api) fn charge(&self, tokens: usize) {
        self.key.quota().charge(tokens);
    }
}

/// Runs `request` with `context` as its task's [`current`].
pub(super) async fn with<F: Future>(context: Arc<AuthContext>, request: F) -> F::Output {
    CONTEXT.scope(context, request).await
}

/// The context of the request that this task serves; `None` when the server has no keys. A task-local, so that no
/// format has to pass it down.
pub(in crate::api) fn current() -> Option<Arc<AuthContext>> {
    CONTEXT.try_with(Arc::clone).ok()
}

/// Whether the request may store something for later requests: with keys, that needs [`Scope::Sessions`].
pub(in crate::api) fn may_store() -> bool {
    current().is_none_or(|context| context.may_store())
}

/// Refuses `param`, which asks to store something, unless the key has [`Scope::Sessions`].
pub(in crate::api) fn check_may_store(param: &str) -> Result<(), ApiError> {
    if may_store() {
        return Ok(());
    }
    let message = format!("{param} must be absent: this API key lacks the scope `{}`", Scope::Sessions);
    Err(ApiError::request(StatusCode::FORBIDDEN, Some(param), Some("insufficient_scope"), message))
}
