//! Health and latency of a store's two back ends, the index and the object store: how long operations take, how many
//! fail, and whether a remote back end is out of reach, so that requests that need it are refused at once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::error::StoreError;

/// Upper bounds of the latency buckets, in seconds.
pub const LATENCY_BOUNDS: [f64; 14] =
    [0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// The operation that proves that a remote back end works again: while writes fail, other operations may still succeed.
pub(crate) const PUT: &str = "put";

/// Latencies of one kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// The kind of operation.
    pub operation: &'static str,
    /// Number of operations per bucket: those that took at most the bound and longer than the bound before it; the last
    /// bucket counts those that took longer than every bound.
    pub counts: [u64; LATENCY_BOUNDS.len() + 1],
    /// Total time of the operations, in nanoseconds.
    pub nanoseconds: u64,
    /// Number of failed operations.
    pub failures: u64,
}

/// Measures a back end's operations and remembers its failures.
#[derive(Debug)]
pub(crate) struct Backend {
    /// The back end's name in errors.
    name: &'static str,
    timers: Box<[Timer]>,
    /// Whether the back end may become unreachable while the server runs. If so, its operations have time limits, and
    /// its failures are remembered.
    is_remote: bool,
    failure: Mutex<Option<StoreError>>,
    failed: Notify,
}

#[derive(Debug)]
struct Timer {
    operation: &'static str,
    counts: [AtomicU64; LATENCY_BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
    failures: AtomicU64,
}

impl Backend {
    /// Creates a back end with these kinds of operations.
    pub(crate) fn new(name: &'static str, operations: &[&'static str], is_remote: bool) -> Arc<Self> {
        let timer = |operation: &&'static str| Timer {
            operation,
            counts: Default::default(),
            nanoseconds: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        };
        let timers = operations.iter().map(timer).collect();
        Arc::new(Self { name, timers, is_remote, failure: Mutex::default(), failed: Notify::new() })
    }

    pub(crate) fn is_remote(&self) -> bool {
        self.is_remote
    }

    /// Runs an operation. On a remote back end, it fails if it takes longer than `limit`.
    pub(crate) async fn run<T>(
        &self,
        operation: &'static str,
        limit: Option<Duration>,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let mut result = match limit.filter(|_| self.is_remote) {
            Some(limit) => timeout(limit, work).await.unwrap_or_else(|_| Err(no_answer(limit))),
            None => work.await,
        };
        if let (Err(StoreError::Unavailable { reason }), true) = (&mut result, self.is_remote) {
            *reason = format!("{}: {reason}", self.name);
        }
        let failed = matches!(result, Err(StoreError::Unavailable { .. } | StoreError::Full { .. }));
        if let Some(timer) = self.timers.iter().find(|timer| timer.operation == operation) {
            timer.add(began.elapsed(), failed);
        }
        if self.is_remote {
            self.remember(operation, result.as_ref().err());
        }
        result
    }

    fn remember(&self, operation: &str, error: Option<&StoreError>) {
        let mut failure = self.failure();
        match error {
            // Other failures may concern one object or one missing permission. Only a write shows whether turns can be
            // stored.
            Some(StoreError::Unavailable { .. }) if operation != PUT => self.failed.notify_one(),
            Some(error @ StoreError::Unavailable { .. }) => {
                if failure.is_none() {
                    tracing::warn!("{error}; turns are refused until it works again");
                }
                *failure = Some(error.clone());
                self.failed.notify_one();
            }
            None if operation == PUT && failure.take().is_some() => tracing::info!("{} works again", self.name),
            _ => {}
        }
    }

    /// Returns the error of the last failed write, unless a write has succeeded since.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.failure().clone().map_or(Ok(()), Err)
    }

    /// Waits until an operation fails or [`Self::wake`] is called.
    pub(crate) async fn failed(&self) {
        self.failed.notified().await;
    }

    /// Wakes the task that waits in [`Self::failed`].
    pub(crate) fn wake(&self) {
        self.failed.notify_one();
    }

    /// Returns the latencies so far for each kind of operation.
    pub(crate) fn latencies(&self) -> Vec<Latency> {
        self.timers.iter().map(Timer::read).collect()
    }

    fn failure(&self) -> MutexGuard<'_, Option<StoreError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error for an operation that exceeded its time limit.
pub(crate) fn no_answer(limit: Duration) -> StoreError {
    StoreError::Unavailable { reason: format!("no answer within {:.1} s", limit.as_secs_f64()) }
}

impl Timer {
    fn add(&self, time: Duration, failed: bool) {
        let seconds = time.as_secs_f64();
        self.counts[LATENCY_BOUNDS.partition_point(|bound| *bound < seconds)].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
        self.failures.fetch_add(failed.into(), Relaxed);
    }

    fn read(&self) -> Latency {
        let counts = std::array::from_fn(|at| self.counts[at].load(Relaxed));
        let (nanoseconds, failures) = (self.nanoseconds.load(Relaxed), self.failures.load(Relaxed));
        Latency { operation: self.operation, counts, nanoseconds, failures }
    }
}

/// Returns the pauses between attempts: each is about twice as long as the one before, up to `longest`. They are
/// randomized, so that servers that fail together do not all retry together.
pub(crate) fn pauses(first: Duration, longest: Duration) -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(first), move |pause| Some((*pause * 2).min(longest)))
        .map(|pause| pause.mul_f64(rand::random_range(0.5..1.5)))
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;
    use crate::sync::block_on;

    const SHORT: Option<Duration> = Some(Duration::from_millis(1));

    fn down() -> StoreError {
        StoreError::Unavailable { reason: "it is down".to_owned() }
    }

    #[test]
    fn a_remote_back_end_that_takes_no_writes_is_named_until_something_is_written() {
        block_on(async {
            let backend = Backend::new("the object store", &["get", PUT], true);
            assert_eq!(backend.check(), Ok(()));
            let failed = backend.run("get", SHORT, ready(Err::<(), _>(down()))).await;
            assert_eq!(failed, Err(StoreError::Unavailable { reason: "the object store: it is down".to_owned() }));
            // The failure may concern a single object. The task that waits for failures checks.
            assert_eq!(backend.check(), Ok(()));
            backend.failed().await;
            let hung = backend.run(PUT, SHORT, pending::<Result<(), _>>()).await;
            let reason = "the object store: no answer within 0.0 s".to_owned();
            assert_eq!(hung, Err(StoreError::Unavailable { reason }));
            assert_eq!(backend.run("get", SHORT, ready(Ok(()))).await, Ok(()));
            assert_eq!(backend.check(), hung);
            assert_eq!(backend.run(PUT, SHORT, ready(Ok(()))).await, Ok(()));
            assert_eq!(backend.check(), Ok(()));
            let [get, put] = backend.latencies()[..] else { panic!("there are two operations") };
            assert_eq!((get.counts.iter().sum::<u64>(), get.failures), (2, 1));
            assert_eq!((put.counts.iter().sum::<u64>(), put.failures), (2, 1));
        });
    }

    #[test]
    fn one_on_this_machine_is_only_measured() {
        block_on(async {
            let backend = Backend::new("the index", &["read"], false);
            assert_eq!(backend.run("read", SHORT, ready(Err::<(), _>(down()))).await, Err(down()));
            assert_eq!(backend.check(), Ok(()));
            assert_eq!(backend.latencies()[0].failures, 1);
        });
    }

    #[test]
    fn times_are_counted_under_the_bound_that_they_do_not_exceed() {
        let backend = Backend::new("the index", &["read"], false);
        for milliseconds in [1, 2, 20_000] {
            backend.timers[0].add(Duration::from_millis(milliseconds), false);
        }
        let Latency { counts, nanoseconds, .. } = backend.latencies()[0];
        let under = |bound| LATENCY_BOUNDS.iter().position(|known| *known == bound).expect("a bound");
        assert_eq!((counts[under(0.001)], counts[under(0.0025)], counts[LATENCY_BOUNDS.len()]), (1, 1, 1));
        assert_eq!(nanoseconds, 20_003_000_000);
    }

    #[test]
    fn pauses_grow_up_to_the_longest_and_differ() {
        let of = || pauses(Duration::from_millis(10), Duration::from_millis(250)).take(9).collect::<Vec<_>>();
        let first = of();
        assert!(first[0] < Duration::from_millis(15) && first[8] >= Duration::from_millis(125));
        assert!(first.iter().all(|pause| *pause < Duration::from_millis(375)));
        assert_ne!(first, of());
    }
}
