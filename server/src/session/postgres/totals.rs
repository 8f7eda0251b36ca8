//! The totals in memory: changes by this server's transactions are added at once, and every few seconds the true
//! totals, which other servers change as well, replace them.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::session::index::{Capacity, Change, Reservation, Totals};

/// A database snapshot: which transactions had been committed at one moment. PostgreSQL writes it as
/// `xmin:xmax:xid,xid`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// All transactions before this one had ended.
    first_running: u64,
    /// This transaction and all later ones had not begun.
    first_unknown: u64,
    running: HashSet<u64>,
}

impl Moment {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (first_running, first_unknown) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let running = parts.next()?.split(',').filter(|part| !part.is_empty());
        Some(Self { first_running, first_unknown, running: running.map(str::parse).collect::<Result<_, _>>().ok()? })
    }

    /// Returns whether a committed transaction had been committed at this moment.
    fn includes(&self, transaction: u64) -> bool {
        transaction < self.first_running || (transaction < self.first_unknown && !self.running.contains(&transaction))
    }
}

/// Keeps a [`Capacity`] up to date.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) capacity: Capacity,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The moment at which the totals that the capacity is based on were read.
    read_at: Moment,
    /// The transactions of this server that those totals do not include.
    later: Vec<(u64, Change)>,
}

impl Ledger {
    /// Adds what a committed transaction has changed, unless the totals already include it.
    pub(super) fn add(&self, transaction: u64, change: Change, fulfilled: Vec<Arc<Reservation>>) {
        let mut state = self.lock();
        let known = state.read_at.includes(transaction);
        let now = if known { Change::default() } else { copy(&change) };
        if !known {
            state.later.push((transaction, change));
        }
        self.capacity.apply(Change { fulfilled, ..now });
    }

    /// Replaces the totals with those that were read at this moment.
    pub(super) fn replace(&self, totals: Totals, read_at: Moment) {
        let mut state = self.lock();
        state.later.retain(|(transaction, _)| !read_at.includes(*transaction));
        state.read_at = read_at;
        self.capacity.replace(totals);
        for (_, change) in &state.later {
            self.capacity.apply(copy(change));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies a change without its reservations.
fn copy(change: &Change) -> Change {
    let Change { live, garbage, sessions, versions, receipts, texts, owners, evictable, .. } = change;
    Change {
        live: *live,
        garbage: *garbage,
        sessions: *sessions,
        versions: *versions,
        receipts: *receipts,
        texts: *texts,
        owners: owners.clone(),
        evictable: evictable.clone(),
        fulfilled: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::id::Owner;

    fn change(bytes: i64) -> Change {
        let owners = [(Owner([1; 16]), bytes)].into();
        Change { live: bytes, versions: 1, owners, ..Change::default() }
    }

    #[test]
    fn a_transaction_counts_once_whenever_the_totals_are_read() {
        let ledger = Ledger::default();
        let live = || ledger.capacity.totals(|totals| totals.live);
        let read = |live| Totals { live, owners: [(Owner([1; 16]), live)].into(), ..Totals::default() };
        ledger.add(10, change(1), Vec::new());
        // The totals were read while 10 and 12 were running, so they include neither.
        ledger.replace(read(100), Moment::parse("10:13:10,12").unwrap());
        assert_eq!(live(), 101);
        // They include 11, which this server hears of after it has read the totals.
        ledger.add(11, change(2), Vec::new());
        assert_eq!(live(), 101);
        ledger.add(12, change(4), Vec::new());
        ledger.add(13, change(8), Vec::new());
        assert_eq!(live(), 113);
        ledger.replace(read(105), Moment::parse("13:13:").unwrap());
        assert_eq!(live(), 113);
        ledger.replace(read(113), Moment::parse("14:14:").unwrap());
        assert_eq!(live(), 113);
    }

    #[test]
    fn a_moment_that_is_none_is_refused() {
        for wrong in ["", "1", "1:2", "1:x:", "1:2:y"] {
            assert_eq!(Moment::parse(wrong), None, "{wrong}");
        }
    }
}
