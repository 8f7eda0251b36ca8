//! Counters of the engine's work, readable from any thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tidegate_model::Denominators;

/// Upper bounds of the histogram of decode steps by number of rows; wider steps have a bucket of their own.
pub const ROWS_BOUNDS: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// The engine's work since it started, and its current load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of slots: requests that can run at once.
    pub slots: u64,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Slots in use.
    pub running: u64,
    /// Requests that wait for a slot.
    pub waiting: u64,
    /// Decode steps of all sizes.
    pub steps: u64,
    /// Decode steps by rows: a bucket for each of [`ROWS_BOUNDS`], then one for more rows.
    pub steps_by_rows: [u64; ROWS_BOUNDS.len() + 1],
    /// Rows of all decode steps.
    pub rows: u64,
    /// Rows that were ready for a decode step and waited for a later one, added up over all steps.
    pub rows_waited: u64,
    /// Prompt tokens read.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Generated tokens that a grammar forced, and that were accepted without a decode step.
    pub forced_tokens: u64,
    /// Draft tokens that the model has read.
    pub drafted_tokens: u64,
    /// Draft tokens that were kept.
    pub accepted_drafts: u64,
    /// Requests that finished.
    pub finished: u64,
    /// Requests ended by an error, a panic or a stalled reader.
    pub failed: u64,
    /// Requests whose clients left.
    pub cancelled: u64,
    /// Waiting requests that were displaced by those of other tenants.
    pub displaced: u64,
    /// Passes of the model: prompt chunks and decode steps.
    pub passes: u64,
    /// Requests that got a slot.
    pub admitted: u64,
    /// Passes between submission and slot, summed over all requests that got a slot.
    pub waited_passes: u64,
    /// The model's counts of denominators; zeros if it has none.
    pub denominators: Denominators,
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    slots: u64,
    slot_bytes: u64,
    pub(super) running: AtomicU64,
    steps_by_rows: [AtomicU64; ROWS_BOUNDS.len() + 1],
    rows: AtomicU64,
    rows_waited: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) generated_tokens: AtomicU64,
    pub(super) forced_tokens: AtomicU64,
    pub(super) drafted_tokens: AtomicU64,
    pub(super) accepted_drafts: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) displaced: AtomicU64,
    pub(super) passes: AtomicU64,
    pub(super) admitted: AtomicU64,
    pub(super) waited_passes: AtomicU64,
    denominators: AtomicU64,
    clamped: AtomicU64,
}

impl Counters {
    /// Creates counters that are zero, for `slots` slots of `slot_bytes` bytes each.
    pub(super) fn new(slots: usize, slot_bytes: usize) -> Self {
        Self { slots: slots as u64, slot_bytes: slot_bytes as u64, ..Self::default() }
    }

    /// Counts a decode step with `rows` rows, while `waiting` others were ready.
    pub(super) fn step(&self, rows: usize, waiting: usize) {
        add(&self.steps_by_rows[ROWS_BOUNDS.partition_point(|bound| *bound < rows)], 1);
        add(&self.rows, rows);
        add(&self.rows_waited, waiting);
        add(&self.passes, 1);
    }

    /// Stores what the model has counted since its creation.
    pub(super) fn denominators(&self, counted: Denominators) {
        self.denominators.store(counted.all, Relaxed);
        self.clamped.store(counted.clamped, Relaxed);
    }

    pub(super) fn read(&self, waiting: usize) -> Stats {
        let steps_by_rows = self.steps_by_rows.each_ref().map(|steps| steps.load(Relaxed));
        Stats {
            slots: self.slots,
            slot_bytes: self.slot_bytes,
            running: self.running.load(Relaxed),
            waiting: waiting as u64,
            steps: steps_by_rows.iter().sum(),
            steps_by_rows,
            rows: self.rows.load(Relaxed),
            rows_waited: self.rows_waited.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
            forced_tokens: self.forced_tokens.load(Relaxed),
            drafted_tokens: self.drafted_tokens.load(Relaxed),
            accepted_drafts: self.accepted_drafts.load(Relaxed),
            finished: self.finished.load(Relaxed),
            failed: self.failed.load(Relaxed),
            cancelled: self.cancelled.load(Relaxed),
            displaced: self.displaced.load(Relaxed),
            passes: self.passes.load(Relaxed),
            admitted: self.admitted.load(Relaxed),
            waited_passes: self.waited_passes.load(Relaxed),
            denominators: Denominators { all: self.denominators.load(Relaxed), clamped: self.clamped.load(Relaxed) },
        }
    }
}

/// Adds `count` to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_counted_in_the_first_bucket_that_holds_its_rows() {
        let counters = Counters::new(3, 5);
        for rows in [1, 2, 3, 4, 5, 1024, 1025] {
            counters.step(rows, 2);
        }
        let stats = counters.read(7);
        assert_eq!((stats.slots, stats.slot_bytes, stats.waiting), (3, 5, 7));
        assert_eq!((stats.steps, stats.rows, stats.rows_waited), (7, 2064, 14));
        assert_eq!(stats.steps_by_rows, [1, 1, 2, 1, 0, 0, 0, 0, 0, 0, 1, 1]);
    }
}
