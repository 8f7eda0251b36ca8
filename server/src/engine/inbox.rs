//! Where requests wait for the engine: a bounded queue that wakes it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;
use tracing::Span;

use super::event::{Event, Failure, Interrupt};
use super::request::Request;

/// How long the engine sleeps when all it has are readers that are behind and states on their way.
const NAP: Duration = Duration::from_millis(5);

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may.
    #[error("too many requests are waiting, try again soon")]
    QueueFull,
    /// The engine takes no more requests.
    #[error("the server is shutting down")]
    Closed,
}

/// A request on its way to the engine.
pub(super) struct Submission {
    pub(super) request: Request,
    pub(super) sender: Sender<Event>,
    pub(super) interrupt: Interrupt,
    pub(super) submitted: Instant,
    /// The span that the engine's log lines about this request belong to.
    pub(super) span: Span,
}

impl Submission {
    /// Whether it was interrupted, and needs no slot to end.
    pub(super) fn is_over(&self) -> bool {
        self.interrupt.is_asked() && !self.request.is_turn
    }
}

/// Whether the engine goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Requests are taken.
    Open,
    /// None are taken; those that were are finished.
    Draining,
    /// Nothing is finished any more.
    Aborting,
}

/// What the engine does where no request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Goes on at once.
    Not,
    /// Looks again soon.
    Briefly,
    /// Sleeps until there is work.
    ForWork,
}

/// What [`Inbox::take`] gives the engine.
pub(super) struct Taken {
    pub(super) submissions: Vec<Submission>,
    pub(super) phase: Phase,
    /// Whether more wait.
    pub(super) more: bool,
}

/// The queue between the submitters and the engine.
pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
    capacity: usize,
}

struct State {
    queue: VecDeque<Submission>,
    phase: Phase,
    /// Whether the engine is to look again: what it waits for has come.
    woken: bool,
}

impl Inbox {
    pub(super) fn new(capacity: usize) -> Self {
        let state = State { queue: VecDeque::new(), phase: Phase::Open, woken: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), capacity }
    }

    /// Queues all of `submissions`, or none of them.
    pub(super) fn submit(&self, submissions: Vec<Submission>) -> Result<(), SubmitError> {
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(SubmitError::Closed);
        }
        if state.queue.len() + submissions.len() > self.capacity {
            // Those whose clients have left must not keep others out.
            state.queue.retain(|waiting| !waiting.sender.is_closed());
            if state.queue.len() + submissions.len() > self.capacity {
                return Err(SubmitError::QueueFull);
            }
        }
        state.queue.extend(submissions);
        self.changed.notify_all();
        Ok(())
    }

    /// Takes at most `room` submissions, and all that are over, waiting as `wait` says while there are none.
    pub(super) fn take(&self, room: usize, wait: Wait) -> Taken {
        let mut state = self.lock();
        let nothing = |state: &mut State| state.queue.is_empty() && state.phase == Phase::Open;
        match wait {
            Wait::Not => {}
            Wait::Briefly if state.woken || (room > 0 && !state.queue.is_empty()) => {}
            Wait::Briefly => {
                state = self.changed.wait_timeout(state, NAP).unwrap_or_else(PoisonError::into_inner).0;
            }
            Wait::ForWork => {
                state = self.changed.wait_while(state, nothing).unwrap_or_else(PoisonError::into_inner);
            }
        }
        state.woken = false;
        // Those that are over wait for no slot.
        let mut submissions = Vec::new();
        if state.queue.iter().any(Submission::is_over) {
            let (over, queue): (Vec<_>, _) =
                std::mem::take(&mut state.queue).into_iter().partition(Submission::is_over);
            (submissions, state.queue) = (over, queue.into());
        }
        let count = room.min(state.queue.len());
        submissions.extend(state.queue.drain(..count));
        Taken { submissions, phase: state.phase, more: !state.queue.is_empty() }
    }

    /// Ends a short wait of the engine's, or the next one.
    pub(super) fn wake(&self) {
        self.lock().woken = true;
        self.changed.notify_all();
    }

    /// Moves on to `phase`; never back.
    pub(super) fn advance(&self, phase: Phase) {
        let mut state = self.lock();
        state.phase = state.phase.max(phase);
        self.changed.notify_all();
    }

    /// Takes no more, and ends what waits.
    pub(super) fn shut(&self) {
        let mut state = self.lock();
        state.phase = Phase::Aborting;
        for waiting in state.queue.drain(..) {
            // A reader whose channel is new has room for its only event, or has left.
            let _ = waiting.sender.try_send(Event::Failed(Failure::ShuttingDown));
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.lock().phase
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn waiting(&self) -> usize {
        self.lock().queue.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, and a queue is whole between any two statements here.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
