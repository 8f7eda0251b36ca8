//! The engine's handle, which the rest of the server uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tracing::Span;

use super::event::{EventStream, Interrupt};
use super::queue::{Lifecycle, RequestQueue, SubmitError};
use super::request::Request;
use super::stats::{Counters, Stats, add};
use super::submission::Submission;
use super::tenants::Tenant;

/// Events that a request's channel can hold; the engine collects and keeps what has no room there.
const EVENT_BUFFER: usize = 32;

/// The state that the engine's thread and its handles share.
pub(super) struct Shared {
    pub(super) queue: RequestQueue,
    pub(super) counters: Counters,
    pub(super) alive: AtomicBool,
    pub(super) heartbeat: Heartbeat,
    pub(super) stall_limit: Duration,
    pub(super) slots: usize,
}

impl Shared {
    /// Whether requests are running and the engine has made no step for too long.
    fn is_stuck(&self) -> bool {
        self.counters.running.load(Ordering::Relaxed) > 0 && self.heartbeat.is_late()
    }
}

/// Stands for "paused" in place of the time of a beat: later than any time.
const PAUSED: u64 = u64::MAX;

/// The time of the last iteration of the engine's loop. A source is read as a whole and has no time limit, so the
/// heartbeat is paused meanwhile.
pub(super) struct Heartbeat {
    started: Instant,
    /// Milliseconds from `started` to the last beat; [`PAUSED`] if there is no time limit.
    last: AtomicU64,
    pub(super) limit: Duration,
}

impl Heartbeat {
    pub(super) fn new(limit: Duration) -> Self {
        Self { started: Instant::now(), last: AtomicU64::new(0), limit }
    }

    pub(super) fn beat(&self) {
        self.last.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Removes the time limit until the next beat.
    pub(super) fn pause(&self) {
        self.last.store(PAUSED, Ordering::Relaxed);
    }

    fn is_late(&self) -> bool {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(last) > self.limit
    }
}

/// Submits requests to the engine; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) shared: Arc<Shared>,
}

impl EngineHandle {
    /// Submits one request. The engine's log lines about the request belong to the current span.
    ///
    /// # Errors
    /// The queue is full, or the engine accepts no more requests.
    pub fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let mut streams = self.submit_all(vec![request])?;
        streams.pop().ok_or(SubmitError::Closed)
    }

    /// Submits all of `requests`, or none of them; their events come in the same order.
    ///
    /// # Errors
    /// The queue has no room for all, or the engine accepts no more requests.
    pub fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<EventStream>, SubmitError> {
        self.submit_for(Tenant::default(), requests)
    }

    /// Submits requests like [`Self::submit_all`], for one of several tenants that share the slots and the queue
    /// fairly.
    ///
    /// # Errors
    /// The tenant's share of the queue has no room for all, or the engine accepts no more requests.
    pub fn submit_for(&self, tenant: Tenant, requests: Vec<Request>) -> Result<Vec<EventStream>, SubmitError> {
        let counters = &self.shared.counters;
        let (submitted, submitted_at) = (Instant::now(), counters.passes.load(Ordering::Relaxed));
        let (submissions, streams) = requests
            .into_iter()
            .map(|request| {
                let (sender, receiver) = mpsc::channel(EVENT_BUFFER);
                let interrupt = Interrupt::default();
                let stream = EventStream { receiver, interrupt: interrupt.clone() };
                let span = Span::current();
                // The queue sets the real values.
                let (tenant, advance) = (0, 0);
                (Submission { request, sender, interrupt, submitted, span, submitted_at, tenant, advance }, stream)
            })
            .unzip();
        let displaced = self.shared.queue.submit(tenant, submissions)?;
        add(&counters.displaced, displaced);
        Ok(streams)
    }

    /// Sets how many tenants to expect: slots are kept free for those that have none. Without this call, only tenants
    /// count that have submitted requests since the engine last had nothing to do.
    pub fn expect_tenants(&self, tenants: usize) {
        self.shared.queue.expect_tenants(tenants);
    }

    /// Whether the engine accepts requests and is not stuck.
    pub fn is_ready(&self) -> bool {
        let shared = &self.shared;
        shared.alive.load(Ordering::Acquire) && shared.queue.lifecycle() == Lifecycle::Open && !shared.is_stuck()
    }

    /// How long a request may keep its slot while nobody reads its text.
    pub fn stall_limit(&self) -> Duration {
        self.shared.stall_limit
    }

    /// Most requests that may wait at once.
    pub fn queue_capacity(&self) -> usize {
        self.shared.queue.capacity()
    }

    /// Most requests that may run at once.
    pub fn slots(&self) -> usize {
        self.shared.slots
    }

    /// Returns counters of what the engine has done so far.
    pub fn stats(&self) -> Stats {
        self.shared.counters.read(self.shared.queue.waiting())
    }

    /// Stops accepting requests. The engine finishes those it has; then its thread ends.
    pub fn drain(&self) {
        self.shared.queue.advance(Lifecycle::Draining);
    }

    /// Ends all requests at the next step.
    pub fn abort(&self) {
        self.shared.queue.advance(Lifecycle::Aborting);
    }
}

/// The engine's thread.
pub struct EngineThread {
    pub(super) thread: JoinHandle<()>,
}

impl EngineThread {
    /// Waits for the thread to end, after [`EngineHandle::drain`] or [`EngineHandle::abort`].
    pub fn join(self) {
        // A panic has been logged, and its requests' channels are closed: there is nothing left to do.
        let _ = self.thread.join();
    }
}
