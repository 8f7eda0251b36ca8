//! The bounded queue in which requests wait for the engine, and which wakes it. `tenants` decides the order.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::event::{Event, Failure};
use super::submission::Submission;
use super::tenants::{Tenant, Tenants, Usage};

/// How long the engine sleeps when only slow readers and pending transfers are left.
const NAP: Duration = Duration::from_millis(5);

/// Most requests that get a slot between two steps if their tenants already have slots. Each admission costs the time
/// to clear a slot or to load a state, and the other rows wait meanwhile.
const ADMISSIONS: usize = 4;

/// Why a request was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full.
    #[error("too many requests are waiting, try again soon")]
    QueueFull,
    /// The engine accepts no more requests.
    #[error("the server is shutting down")]
    Closed,
}

/// The stages of the engine's life, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lifecycle {
    /// Accepts requests.
    Open,
    /// Accepts none, and finishes the requests it has.
    Draining,
    /// Ends all requests unfinished.
    Aborting,
}

/// What the engine does if no request is waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Continues at once.
    No,
    /// Looks again after a nap.
    Briefly,
    /// Sleeps until there is work.
    ForWork,
}

/// The result of [`RequestQueue::take`].
pub(super) struct Batch {
    pub(super) submissions: Vec<Submission>,
    pub(super) lifecycle: Lifecycle,
    /// Whether more requests are waiting.
    pub(super) more: bool,
    /// Whether there is more than one tenant.
    pub(super) shared: bool,
}

/// The queue between the submitters and the engine.
pub(super) struct RequestQueue {
    state: Mutex<State>,
    changed: Condvar,
    capacity: usize,
    slots: usize,
}

struct State {
    tenants: Tenants,
    lifecycle: Lifecycle,
    /// Whether a pending transfer has ended since the last `take`.
    woken: bool,
}

impl RequestQueue {
    pub(super) fn new(capacity: usize, slots: usize) -> Self {
        let state = State { tenants: Tenants::default(), lifecycle: Lifecycle::Open, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), capacity, slots }
    }

    /// Queues all of `submissions`, or none of them. Returns how many requests of other tenants were displaced.
    pub(super) fn submit(&self, tenant: Tenant, submissions: Vec<Submission>) -> Result<usize, SubmitError> {
        let mut state = self.lock();
        if state.lifecycle != Lifecycle::Open {
            return Err(SubmitError::Closed);
        }
        let displaced = state.tenants.add(tenant, submissions, self.capacity).ok_or(SubmitError::QueueFull)?;
        self.changed.notify_all();
        fail_all(&displaced, Failure::Displaced);
        Ok(displaced.len())
    }

    /// Takes the submissions that get one of the `room` free slots (the slots then count as their tenants'), all
    /// interrupted submissions, and some whose clients have left. If there are none, waits as `wait` says.
    pub(super) fn take(&self, mut room: usize, usage: &mut Usage, wait: Wait) -> Batch {
        let mut state = self.lock();
        state.tenants.update(usage);
        let nothing = |state: &mut State| state.tenants.waiting() == 0 && state.lifecycle == Lifecycle::Open;
        match wait {
            Wait::No => {}
            Wait::Briefly if state.woken || state.tenants.choose((room, self.slots), usage, true).is_some() => {}
            Wait::Briefly => {
                state = self.changed.wait_timeout(state, NAP).unwrap_or_else(PoisonError::into_inner).0;
            }
            Wait::ForWork => {
                state = self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.woken = false;
        state.tenants.update(usage);
        let mut submissions = state.tenants.take_interrupted();
        let mut more = if state.tenants.count() > 1 { ADMISSIONS } else { usize::MAX };
        while let Some(tenant) = state.tenants.choose((room, self.slots), usage, more > 0)
            && let Some(submission) = state.tenants.take(tenant, usage)
        {
            more -= usize::from(usage.slots(tenant) > 1);
            room -= usize::from(submission.advance > 0);
            submissions.push(submission);
        }
        let State { tenants, lifecycle, .. } = &*state;
        Batch { submissions, lifecycle: *lifecycle, more: tenants.waiting() > 0, shared: tenants.count() > 1 }
    }

    /// Whether a waiting request may take one of `room` free slots.
    pub(super) fn has_next(&self, room: usize, usage: &Usage) -> bool {
        self.lock().tenants.choose((room, self.slots), usage, true).is_some()
    }

    /// Sets how many tenants to expect.
    pub(super) fn expect_tenants(&self, tenants: usize) {
        self.lock().tenants.expect(tenants);
    }

    /// Ends the engine's nap, or its next one if it is not napping.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Advances to `lifecycle`; never goes back.
    pub(super) fn advance(&self, lifecycle: Lifecycle) {
        let mut state = self.lock();
        state.lifecycle = state.lifecycle.max(lifecycle);
        self.changed.notify_all();
    }

    /// Accepts no more requests, and fails those that are waiting.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.lifecycle = Lifecycle::Aborting;
        fail_all(&state.tenants.take_all(), Failure::ShuttingDown);
    }

    pub(super) fn lifecycle(&self) -> Lifecycle {
        self.lock().lifecycle
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn waiting(&self) -> usize {
        self.lock().tenants.waiting()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, and the queue is consistent between any two statements here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fail_all(submissions: &[Submission], failure: Failure) {
    for submission in submissions {
        // The channel is new, so it has room for its only event, unless the reader has left.
        let _ = submission.sender.try_send(Event::Failed(failure));
    }
}
