//! Requests that wait for sessions in use (`Prefer: wait`).

use crate::api::error::ApiError;
use crate::api::shares::{Share, Shares};
use crate::session::Owner;

/// Most requests that may wait; each holds its body in memory. One owner may have at most half of them.
const MAX_WAITERS: u64 = 256;

/// The requests that wait.
#[derive(Clone)]
pub(in crate::api) struct Waiters(Shares);

impl Default for Waiters {
    fn default() -> Self {
        Self(Shares::new(MAX_WAITERS))
    }
}

impl Waiters {
    /// Lets a request of `owner` wait for a session, until the share is dropped.
    pub(in crate::api) fn enter(&self, owner: Owner) -> Result<Share, ApiError> {
        self.take(owner, "sessions in use", "prefer")
    }

    /// Lets a request of `owner` wait for a model that is loading, until the share is dropped.
    pub(in crate::api) fn enter_for_model(&self, owner: Owner) -> Result<Share, ApiError> {
        self.take(owner, "sessions or models", "model")
    }

    fn take(&self, owner: Owner, awaited: &str, param: &'static str) -> Result<Share, ApiError> {
        self.0.take(owner, 1).map_err(|left| {
            let message = format!(
                "{} of your requests already wait for {awaited}, and {} may: half of the {MAX_WAITERS} places that others \
                 leave",
                left.held, left.most
            );
            ApiError::rate_limit("too_many_waiting", message).about(param)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_that_fill_their_places_leave_some_to_others() {
        let waiters = Waiters::default();
        let enter = |owner: u8| waiters.enter(Owner([owner; 16]));
        let mut held: Vec<Share> = (0..128).map(|_| enter(1).unwrap()).collect();
        let refused = enter(1).err().unwrap();
        assert_eq!((refused.status().as_u16(), refused.label()), (429, "too_many_waiting"));
        assert!(refused.message().starts_with("128 of your requests already wait for sessions in use"));
        let refused = waiters.enter_for_model(Owner([1; 16])).err().unwrap();
        assert!(refused.message().starts_with("128 of your requests already wait for sessions or models"));
        for owner in 2..5 {
            held.extend((0..64).map_while(|_| enter(owner).ok()));
        }
        assert!(enter(9).is_ok(), "four owners with as many requests as they may have");
        assert!(enter(4).err().unwrap().message().starts_with("16 of your requests already wait"));
        held.pop();
        assert!(enter(4).is_ok());
    }
}
