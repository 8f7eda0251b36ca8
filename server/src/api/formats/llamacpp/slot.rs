//! Slots: a slot is a session of the caller, whose id is derived from the slot's number.

use axum::http::HeaderMap;
use rand::Rng;

use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::request::continuation::{Continuation, wait};
use crate::api::state::AppState;
use crate::session::{Metadata, NewSession, Owner, SessionId, Start};

/// The highest slot number.
pub(super) const MAX_SLOT: u64 = 65_535;

/// The metadata key that says which slot a session is.
const SLOT: &str = "llama.cpp slot";

/// A checked slot number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotId(u64);

impl SlotId {
    /// Checks a slot number.
    pub(super) fn new(number: u64) -> Result<Self, ApiError> {
        if number <= MAX_SLOT {
            return Ok(Self(number));
        }
        let message = format!("id_slot must be from 0 to {MAX_SLOT}, found {number}");
        Err(ApiError::invalid(Some("id_slot"), message))
    }

    /// Returns the number.
    pub(super) fn number(self) -> u64 {
        self.0
    }

    /// Returns the id of the slot's session.
    pub(super) fn session(self, owner: Owner) -> SessionId {
        SessionId::named(owner, SLOT, &self.0.to_string())
    }

    /// Returns the metadata of the slot's session.
    pub(super) fn metadata(self) -> Metadata {
        Metadata::from([(SLOT.to_owned(), self.0.to_string())])
    }
}

/// Finds what a request in a slot continues: the slot's state, if the prompt begins with the slot's text. Waits for a
/// slot that is in use, if the `Prefer` header asks for it. The session of a new slot is created once the request has
/// been validated.
pub(super) async fn continuation(
    slot: SlotId,
    state: &AppState,
    owner: Owner,
    headers: &HeaderMap,
) -> Result<Continuation, ApiError> {
    context::check_may_store("id_slot")?;
    let (store, id, wait) = (state.store()?, slot.session(owner), wait(headers)?);
    let _permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
    let seed = rand::rng().random();
    let turn = store.begin_or_create(owner, &id, (seed, slot.metadata()), wait).await?;
    Ok(Continuation::slot(owner, turn))
}

/// Describes a new session that lasts until it is erased or replaced.
pub(super) fn new(start: Start, metadata: Metadata) -> NewSession {
    NewSession { start, metadata, ttl: None, label: None }
}
