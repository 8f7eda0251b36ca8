//! Divides something limited, such as memory or places to wait, between owners. An owner may hold half of what the
//! others leave, so a few owners cannot shut out those that hold nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::Owner;

/// A limited amount of something, and how much of it each owner holds.
#[derive(Clone)]
pub(in crate::api) struct Shares(Arc<Tally>);

struct Tally {
    total: u64,
    held: Mutex<HashMap<Owner, u64>>,
}

/// What one request holds. Dropping it gives it back.
pub(in crate::api) struct Share {
    shares: Shares,
    owner: Owner,
    amount: u64,
}

/// The error of a request that needs more than its owner may hold now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) struct TooLittle {
    /// What the owner holds.
    pub(in crate::api) held: u64,
    /// What the owner may hold now.
    pub(in crate::api) most: u64,
}

impl Shares {
    /// Creates shares of `total`, of which one owner alone may hold half.
    pub(in crate::api) fn new(total: u64) -> Self {
        Self(Arc::new(Tally { total, held: Mutex::default() }))
    }

    /// Takes `amount` for a request of `owner`.
    pub(in crate::api) fn take(&self, owner: Owner, amount: u64) -> Result<Share, TooLittle> {
        let mut share = self.empty(owner);
        share.grow(amount, u64::MAX)?;
        Ok(share)
    }

    /// Returns a share of `owner` that holds nothing yet.
    pub(in crate::api) fn empty(&self, owner: Owner) -> Share {
        Share { shares: self.clone(), owner, amount: 0 }
    }

    /// Whether nobody holds anything.
    #[cfg(test)]
    pub(in crate::api) fn is_whole(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Owner, u64>> {
        // No code panics while holding this lock.
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Share {
    /// Takes `more` in addition. If that exceeds the owner's limit, an owner's only share is not refused while the
    /// limit is at least `least`: it takes all that the limit leaves instead. So a request that needs more than the
    /// limit is possible if its owner has no other.
    pub(in crate::api) fn grow(&mut self, mut more: u64, least: u64) -> Result<(), TooLittle> {
        let mut all = self.shares.lock();
        let held = all.get(&self.owner).copied().unwrap_or(0);
        let others = all.values().sum::<u64>() - held;
        // The difference is never negative, because each owner was given a part of what was left. Rounding up lets the
        // last unit be taken.
        let most = self.shares.0.total.saturating_sub(others).div_ceil(2);
        if held.saturating_add(more) > most {
            if held > self.amount || most < least {
                return Err(TooLittle { held, most });
            }
            more = most.saturating_sub(held);
        }
        if more > 0 {
            all.insert(self.owner, held + more);
            self.amount += more;
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = self.shares.lock();
        if let Some(held) = all.get_mut(&self.owner) {
            *held -= self.amount;
            if *held == 0 {
                all.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_gets_half_of_what_the_others_leave() {
        let shares = Shares::new(256);
        let [ann, ben, eve] = [1, 2, 3].map(|owner| Owner([owner; 16]));
        let first = [shares.take(ann, 64).ok().unwrap(), shares.take(ann, 64).ok().unwrap()];
        assert_eq!(shares.take(ann, 1).err(), Some(TooLittle { held: 128, most: 128 }));
        let second = shares.take(ben, 64).ok().unwrap();
        assert_eq!(shares.take(ben, 1).err(), Some(TooLittle { held: 64, most: 64 }));
        assert_eq!(shares.take(eve, 33).err(), Some(TooLittle { held: 0, most: 32 }));
        assert!(shares.take(eve, 32).is_ok());
        drop(first);
        assert!(shares.take(ann, 97).is_err() && shares.take(ann, 96).is_ok());
        drop(second);
        assert!(shares.is_whole());
    }

    #[test]
    fn what_is_larger_than_a_part_is_taken_alone() {
        let shares = Shares::new(256);
        let [ann, ben, eve] = [1, 2, 3].map(|owner| Owner([owner; 16]));
        let (mut large, mut second) = (shares.empty(ann), shares.empty(ann));
        assert!(large.grow(100, 32).is_ok() && large.grow(1000, 32).is_ok() && large.grow(1000, 32).is_ok());
        assert_eq!(second.grow(1, 32), Err(TooLittle { held: 128, most: 128 }));
        let mut bens = shares.empty(ben);
        assert!(bens.grow(500, 32).is_ok());
        assert_eq!(bens.grow(500, 65), Err(TooLittle { held: 64, most: 64 }), "its part is too small");
        assert!(shares.take(eve, 32).is_ok() && shares.take(eve, 33).is_err(), "others keep theirs");
        drop((large, bens));
        assert!(second.grow(128, 32).is_ok());
        drop(second);
        assert!(shares.is_whole());
    }

    #[test]
    fn many_owners_that_take_all_they_may_leave_something_for_another() {
        let shares = Shares::new(256);
        let mut held = Vec::new();
        for owner in 0..8 {
            while let Ok(share) = shares.take(Owner([owner; 16]), 1) {
                held.push(share);
            }
        }
        assert_eq!(held.len(), 255);
        assert!(shares.take(Owner([9; 16]), 1).is_ok());
        drop(held);
        assert!(shares.is_whole());
    }
}
