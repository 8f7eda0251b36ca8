//! Counts of what the engine has done, readable from any thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the engine has done since it started, and what it is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Slots in use.
    pub running: u64,
    /// Requests waiting for a slot.
    pub waiting: u64,
    /// Decode steps taken, whatever their batch.
    pub steps: u64,
    /// Tokens of prompts read.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Requests that came to their end.
    pub finished: u64,
    /// Requests ended by an error, a panic or a reader that stalled.
    pub failed: u64,
    /// Requests whose clients left.
    pub cancelled: u64,
}

/// The engine's own counts behind [`Stats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) running: AtomicU64,
    pub(super) steps: AtomicU64,
    pub(super) prompt_tokens: AtomicU64,
    pub(super) generated_tokens: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) cancelled: AtomicU64,
}

impl Counters {
    pub(super) fn read(&self, waiting: usize) -> Stats {
        Stats {
            running: self.running.load(Relaxed),
            waiting: waiting as u64,
            steps: self.steps.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            generated_tokens: self.generated_tokens.load(Relaxed),
            finished: self.finished.load(Relaxed),
            failed: self.failed.load(Relaxed),
            cancelled: self.cancelled.load(Relaxed),
        }
    }
}

/// Adds `count` to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Relaxed);
}
