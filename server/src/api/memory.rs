//! Limits the memory that requests hold. Memory for log probabilities, repeated responses and the states of several
//! texts is reserved before a request is queued, and held until the response is written. Memory for bodies is reserved
//! as they arrive.

use super::error::ApiError;
use super::shares::{Share, Shares};
use crate::session::Owner;

/// Bytes that all responses together may hold. One owner may hold at most half of them.
const ALL_BYTES: u64 = 256 << 20;

/// Bytes of log probabilities that one response may hold: half of what one owner may hold, because a response that is
/// stored for retries is held twice.
pub(in crate::api) const MAX_BYTES: u64 = ALL_BYTES / 4;

/// Bytes that the responses of one owner may hold while others hold none.
const MOST: u64 = ALL_BYTES / 2;

/// What a response holds until it is written, in bytes.
pub(super) struct Held {
    /// Bytes of log probabilities.
    pub(super) listed: u64,
    /// Whether the response is stored for retries, so that its log probabilities are held twice.
    pub(super) is_stored: bool,
    /// Bytes of the states of several texts.
    pub(super) states: u64,
}

/// The memory that responses hold.
#[derive(Clone)]
pub(super) struct ResponseMemory(Shares);

impl Default for ResponseMemory {
    fn default() -> Self {
        Self(Shares::new(ALL_BYTES))
    }
}

impl ResponseMemory {
    /// Reserves memory for what a response of `owner` holds. Refuses, as invalid, a response that needs more than an
    /// owner may ever hold.
    pub(super) fn reserve_held(&self, owner: Owner, held: &Held) -> Result<Option<Share>, ApiError> {
        let bytes = held.listed * (1 + u64::from(held.is_stored)) + held.states;
        if bytes <= MOST {
            return self.reserve(owner, bytes);
        }
        // Log probabilities alone stay within the limit, even if they are held twice.
        let message = format!(
            "n must be lower, or fewer log probabilities be listed: log probabilities ({} MiB{}) and the states of the texts \
             ({} MiB) are held until the response is written, and may have {} MiB together",
            held.listed.div_ceil(1 << 20),
            if held.is_stored { ", twice because of the idempotency-key" } else { "" },
            held.states.div_ceil(1 << 20),
            MOST >> 20
        );
        Err(ApiError::invalid(Some("n"), message))
    }

    /// Reserves memory for a response of `owner`; returns `None` if it needs none.
    fn reserve(&self, owner: Owner, bytes: u64) -> Result<Option<Share>, ApiError> {
        if bytes == 0 {
            return Ok(None);
        }
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let share = self.0.take(owner, bytes).map_err(|left| {
            let message = format!(
                "the log probabilities, repeated responses and states of your requests may hold {} MiB, half of what \
                 others leave, and {} MiB are in use: too little is left for the {} MiB that this request may need; try again soon",
                left.most >> 20,
                mib(left.held),
                mib(bytes)
            );
            ApiError::rate_limit("logprobs_busy", message)
        })?;
        Ok(Some(share))
    }

    /// Reserves memory to repeat a stored response. A response that is larger than an owner's share is repeated, too,
    /// if the owner holds nothing else.
    pub(super) fn reserve_repeated(&self, owner: Owner, bytes: usize) -> Result<Option<Share>, ApiError> {
        self.reserve(owner, (bytes as u64).min(MOST))
    }
}

/// Bytes that the bodies of all requests together may take. One owner may take at most half of them, which fits into
/// what `ram.rs` leaves for the program and its bodies.
const BODY_BYTES: u64 = 128 << 20;

/// The smallest share of an owner, in bytes, that a single body may exceed. At most 16 owners can hold this much at
/// once, so however many owners there are, at most 16 bodies exceed their shares.
const LEAST_PART: u64 = 8 << 20;

/// The memory that bodies take from their first byte until they are parsed.
#[derive(Clone)]
pub(super) struct BodyMemory(Shares);

/// The memory that one body takes. Dropping it frees the memory.
pub(super) struct BodyShare(Share);

impl Default for BodyMemory {
    fn default() -> Self {
        Self(Shares::new(BODY_BYTES))
    }
}

impl BodyMemory {
    /// Returns the share of a body of `owner` before its first byte, which is empty.
    pub(super) fn begin(&self, owner: Owner) -> BodyShare {
        BodyShare(self.0.empty(owner))
    }
}

impl BodyShare {
    /// Reserves `bytes` more. A body that is larger than its owner's share, such as a snapshot, is accepted if the
    /// owner has no other body.
    pub(super) fn reserve(&mut self, bytes: u64) -> Result<(), ApiError> {
        self.0.grow(bytes, LEAST_PART).map_err(|left| {
            let message = format!(
                "the bodies of your requests may take {} KiB until they are parsed, half of what others leave, and {} KiB are \
                 in use: too little is left for more of this one; try again soon",
                left.most >> 10,
                left.held.div_ceil(1 << 10)
            );
            ApiError::rate_limit("bodies_busy", message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_is_refused_says_how_much_is_left() {
        let memory = ResponseMemory::default();
        let [ann, ben, eve] = [1, 2, 3].map(|owner| Owner([owner; 16]));
        let reserve = |owner, mib: u64| memory.reserve(owner, mib * MIB);
        let first = reserve(ann, 128).unwrap();
        let refused = reserve(ann, 1).err().unwrap();
        assert_eq!((refused.status().as_u16(), refused.label()), (429, "logprobs_busy"));
        assert!(refused.message().contains("of your requests may hold 128 MiB"), "{}", refused.message());
        let second = reserve(ben, 64).unwrap();
        assert!(reserve(eve, 33).err().unwrap().message().contains("may hold 32 MiB"));
        assert!(reserve(eve, 32).is_ok() && reserve(ann, 0).unwrap().is_none());
        drop((first, second));
        let held = |states| Held { listed: 64 * MIB, is_stored: true, states };
        assert!(memory.reserve_held(ann, &held(0)).is_ok());
        let never = memory.reserve_held(ann, &held(1)).err().unwrap();
        assert_eq!((never.status().as_u16(), never.param()), (400, Some("n")));
        assert!(never.message().ends_with("128 MiB together"), "{}", never.message());
        let large = memory.reserve_repeated(ann, 500 << 20).unwrap();
        assert!(large.is_some() && memory.reserve_repeated(ann, 1).is_err());
    }

    #[test]
    fn a_body_larger_than_a_part_is_received_alone() {
        let memory = BodyMemory::default();
        let [mut large, mut second, mut bens] = [1, 1, 2].map(|owner| memory.begin(Owner([owner; 16])));
        for _ in 0..10 {
            large.reserve(50 * MIB).unwrap();
        }
        let refused = second.reserve(1).err().unwrap();
        assert_eq!((refused.status().as_u16(), refused.label()), (429, "bodies_busy"));
        assert!(refused.message().contains("may take 65536 KiB"), "{}", refused.message());
        bens.reserve(32 * MIB).unwrap();
        drop(large);
        second.reserve(48 * MIB).unwrap();
    }

    #[test]
    fn bodies_of_many_owners_are_bounded_together() {
        let memory = BodyMemory::default();
        let shares: Vec<_> = (0..200).map(|owner| memory.begin(Owner([owner; 16]))).collect();
        let served = |mut share: BodyShare| share.reserve(100 * MIB).is_ok().then_some(share);
        let large: Vec<_> = shares.into_iter().filter_map(served).collect();
        assert_eq!(large.len(), 4);
        memory.begin(Owner([255; 16])).reserve(4 * MIB).unwrap();
    }
}
