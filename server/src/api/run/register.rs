//! Registers runs, so that they can be stopped.

use std::sync::Arc;

use super::active::{Described, Registration, Stop};
use crate::api::auth::context::{self, AuthContext};
use crate::api::error::ApiError;
use crate::api::state::AppState;
use crate::session::{Owner, SessionId};

/// Registers a run, so that it can be stopped. Then checks that its session and its key still exist, because they may
/// have been removed just before.
pub(in crate::api) async fn register(
    state: &AppState,
    owner: Owner,
    session: Option<SessionId>,
    at_shutdown: Stop,
) -> Result<Registration, ApiError> {
    let auth = context::current();
    let described = Described { session: session.clone(), auth: auth.clone(), at_shutdown };
    let registration = state.active_runs().register(described, state.options().max_time);
    if let Some(session) = session {
        state.store()?.get(owner, &session).await?;
    }
    let keys = state.api_keys().get();
    let is_valid = |auth: &Arc<AuthContext>| keys.as_deref().is_none_or(|keys| auth.is_valid(keys));
    match auth.filter(|auth| !is_valid(auth)).and_then(|_| Stop::KeyRevoked.error()) {
        Some(error) => Err(error),
        None => Ok(registration),
    }
}
