//! The bounded queue in which requests wait for the engine, and which wakes it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tracing::Span;

use super::event::{Event, Failure, Interrupt};
use super::prompt::TextKind;
use super::request::Request;

/// How long the engine sleeps when all that is left are slow readers and pending transfers.
const NAP: Duration = Duration::from_millis(5);

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

/// A queued request.
pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) sender: Sender<Event>,
    pub(super) interrupt: Interrupt,
    pub(super) submitted: Instant,
    /// The span of the engine's log lines about this request.
    pub(super) span: Span,
}

impl Submission {
    /// Whether it was interrupted and can end without a slot.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupt.is_requested() && self.request.kind == TextKind::Completion
    }
}

/// The stages of the engine's life, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lifecycle {
    /// Accepts requests.
    Open,
    /// Accepts none, and finishes those it has.
    Draining,
    /// Finishes nothing any more.
    Aborting,
}

/// What the engine does if no request waits.
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
    /// Whether more requests wait.
    pub(super) more: bool,
}

/// The queue between the submitters and the engine.
pub(super) struct RequestQueue {
    state: Mutex<State>,
    changed: Condvar,
    capacity: usize,
}

struct State {
    queue: VecDeque<Submission>,
    lifecycle: Lifecycle,
    /// Whether a pending transfer has ended since the last call of `take`.
    woken: bool,
}

impl RequestQueue {
    pub(super) fn new(capacity: usize) -> Self {
        let state = State { queue: VecDeque::new(), lifecycle: Lifecycle::Open, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), capacity }
    }

    /// Queues all of `submissions`, or none of them.
    pub(super) fn submit(&self, submissions: Vec<Submission>) -> Result<(), SubmitError> {
        let mut state = self.lock();
        if state.lifecycle != Lifecycle::Open {
            return Err(SubmitError::Closed);
        }
        if state.queue.len() + submissions.len() > self.capacity {
            // Clients that have left must not keep others out.
            state.queue.retain(|waiting| !waiting.sender.is_closed());
            if state.queue.len() + submissions.len() > self.capacity {
                return Err(SubmitError::QueueFull);
            }
        }
        state.queue.extend(submissions);
        self.changed.notify_all();
        Ok(())
    }

    /// Takes at most `room` submissions, and all interrupted ones; waits as `wait` says while there are none.
    pub(super) fn take(&self, room: usize, wait: Wait) -> Batch {
        let mut state = self.lock();
        let nothing = |state: &mut State| state.queue.is_empty() && state.lifecycle == Lifecycle::Open;
        match wait {
            Wait::No => {}
            Wait::Briefly if state.woken || (room > 0 && !state.queue.is_empty()) => {}
            Wait::Briefly => {
                state = self.changed.wait_timeout(state, NAP).unwrap_or_else(PoisonError::into_inner).0;
            }
            Wait::ForWork => {
                state = self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.woken = false;
        let mut submissions = Vec::new();
        if state.queue.iter().any(Submission::is_interrupted) {
            let (interrupted, queue): (Vec<_>, _) =
                std::mem::take(&mut state.queue).into_iter().partition(Submission::is_interrupted);
            (submissions, state.queue) = (interrupted, queue.into());
        }
        let count = room.min(state.queue.len());
        submissions.extend(state.queue.drain(..count));
        Batch { submissions, lifecycle: state.lifecycle, more: !state.queue.is_empty() }
    }

    /// Ends the engine's nap, or its next one.
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

    /// Accepts no more, and ends the waiting requests.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.lifecycle = Lifecycle::Aborting;
        for waiting in state.queue.drain(..) {
            // A new channel has room for its only event, unless the reader has left.
            let _ = waiting.sender.try_send(Event::Failed(Failure::ShuttingDown));
        }
    }

    pub(super) fn lifecycle(&self) -> Lifecycle {
        self.lock().lifecycle
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn waiting(&self) -> usize {
        self.lock().queue.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, and the queue is consistent between any two statements here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
