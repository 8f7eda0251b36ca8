//! The key behind a request: its owner, its permit among the key's concurrent requests, and the tokens that it reserves.

use std::future::Future;
use std::sync::Arc;

use axum::http::StatusCode;
use sha2::{Digest, Sha256};
use tokio::sync::OwnedSemaphorePermit;

use super::keys::{Key, Keys};
use super::quota::{Shortage, seconds};
use super::scope::Scope;
use crate::api::error::ApiError;
use crate::engine::Tenant;
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
        // Only the name counts: a key that is replaced under its name keeps its sessions.
        let digest = Sha256::new().chain_update("tidegate key\0").chain_update(key.name()).finalize();
        let mut owner = [0; 16];
        owner.copy_from_slice(&digest[..16]);
        Self { key, owner: Owner(owner), _permit: permit }
    }

    /// Returns the owner of what the request reads and creates.
    pub(in crate::api) fn owner(&self) -> Owner {
        self.owner
    }

    /// Whether `keys` still include the request's key, with all that it may do.
    pub(in crate::api) fn is_valid(&self, keys: &Keys) -> bool {
        keys.has(&self.key)
    }

    /// Returns the tenant that the engine counts the request's work for.
    fn tenant(&self) -> Tenant {
        Tenant { id: u128::from_le_bytes(self.owner.0), weight: self.key.weight() }
    }

    fn may_store(&self) -> bool {
        self.key.has(Scope::Sessions)
    }

    /// Returns the most tokens that the texts of a request may have if it sets no limit, after prompts of
    /// `prompt_tokens`. This is a part of the quota, so that such a request does not shut out all others. `None`
    /// without a quota.
    pub(in crate::api) fn default_tokens(&self, prompt_tokens: usize) -> Option<usize> {
        let most = self.key.quota().limits().tokens_per_minute?.get() as usize;
        Some((most / DEFAULT_PART).min(most.saturating_sub(prompt_tokens)))
    }

    /// Charges tokens to the quota for work on a request that is refused; charges nothing if fewer are left.
    pub(in crate::api) fn charge(self: Arc<Self>, tokens: usize) {
        let demand = Demand { texts: 1, prompt_tokens: tokens, max_tokens: 0, names: ["prompt", "max_tokens", "n"] };
        if let Ok(mut reservation) = self.reserve(&demand) {
            reservation.spend(tokens);
        }
    }

    /// Reserves all that a request may use.
    fn reserve(self: Arc<Self>, demand: &Demand) -> Result<Reservation, ApiError> {
        let tokens = demand.tokens();
        match self.key.quota().reserve(demand.texts, tokens) {
            Ok(permits) => Ok(Reservation { context: self, left: tokens, _permits: permits }),
            Err(shortage) => Err(demand.refusal(shortage)),
        }
    }
}

/// The divisor of a minute's tokens that gives the share of a request that sets no limit.
const DEFAULT_PART: usize = 4;

/// The most that a request may use, and the parameters that determine it.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Demand {
    pub(in crate::api) texts: usize,
    /// Tokens of all prompts.
    pub(in crate::api) prompt_tokens: usize,
    /// Tokens of each text.
    pub(in crate::api) max_tokens: usize,
    /// The names of the parameters: the prompt, `max_tokens`, and the number of texts.
    pub(in crate::api) names: [&'static str; 3],
}

impl Demand {
    fn tokens(&self) -> usize {
        self.prompt_tokens.saturating_add(self.texts.saturating_mul(self.max_tokens))
    }

    fn refusal(&self, shortage: Shortage) -> ApiError {
        let Self { texts, prompt_tokens, max_tokens, names: [prompt, longest, several] } = *self;
        let refuse = |message: String| ApiError::rate_limit("rate_limit_exceeded", message);
        match shortage {
            Shortage::Texts(most) => {
                let message = format!(
                    "request too large: {several} must ask for at most {most} texts in all, found {texts}: this API \
                     key may have {most} at once (concurrent_requests)"
                );
                refuse(message).about(several).never_retried()
            }
            Shortage::TextsNow(most) => refuse(format!(
                "this API key may have {most} texts at once (concurrent_requests), and too many are running for \
                 {texts} more; {several} sets their number"
            )),
            Shortage::Tokens(most) => {
                let all = self.tokens();
                let least = prompt_tokens.saturating_add(texts);
                let param = if least <= most as usize {
                    longest
                } else if texts > 1 && prompt_tokens < most as usize {
                    several
                } else {
                    prompt
                };
                let message = format!(
                    "request too large: it may use {all} tokens ({prompt_tokens} of prompts, and {texts} x {max_tokens} \
                     of texts), and this API key has {most} per minute (tokens_per_minute); lower {param}"
                );
                refuse(message).about(param).never_retried()
            }
            Shortage::TokensNow(most, wait) => {
                let (all, wait) = (self.tokens(), seconds(wait));
                let message = format!(
                    "this API key has {most} tokens per minute (tokens_per_minute), and too few are left for the {all} \
                     that this request may use; retry in {wait} s or lower {longest}"
                );
                refuse(message).retried_after(wait)
            }
        }
    }
}

/// What a running request has reserved of its key's quota. Dropping it, however the request ends, gives back what was not
/// used.
pub(in crate::api) struct Reservation {
    context: Arc<AuthContext>,
    left: usize,
    _permits: Option<OwnedSemaphorePermit>,
}

impl Reservation {
    /// Uses reserved tokens.
    pub(in crate::api) fn spend(&mut self, tokens: usize) {
        self.left = self.left.saturating_sub(tokens);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.context.key.quota().give_back(self.left);
    }
}

/// Returns the tenant that the engine counts the work of the [`current`] request for: its key, or everybody if the
/// server has no keys.
pub(in crate::api) fn tenant() -> Tenant {
    current().map_or_else(Tenant::default, |context| context.tenant())
}

/// Reserves all that the [`current`] request may use; returns `None` if the server has no keys.
pub(in crate::api) fn reserve(demand: &Demand) -> Result<Option<Reservation>, ApiError> {
    current().map(|context| context.reserve(demand)).transpose()
}

/// Runs `request` with `context` as its task's [`current`].
pub(super) async fn with<F: Future>(context: Arc<AuthContext>, request: F) -> F::Output {
    CONTEXT.scope(context, request).await
}

/// Returns the context of the request that this task serves; `None` if the server has no keys. A task-local, so that no
/// format has to pass it down.
pub(in crate::api) fn current() -> Option<Arc<AuthContext>> {
    CONTEXT.try_with(Arc::clone).ok()
}

/// Whether the key of the [`current`] request may use a model.
pub(in crate::api) fn may_use(model: &str) -> bool {
    current().is_none_or(|context| context.key.models.allows(model))
}

/// Refuses a model that the key of the [`current`] request may not use.
pub(in crate::api) fn check_model(model: &str) -> Result<(), ApiError> {
    if may_use(model) {
        return Ok(());
    }
    let message = format!("this API key may not use the model `{model}`");
    Err(ApiError::request(StatusCode::FORBIDDEN, Some("model"), Some("insufficient_scope"), message))
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
