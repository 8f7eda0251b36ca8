//! Takes the place of the server's module `sync` in the code that `models` includes: shuttle decides which thread runs
//! next at each of these operations, so that a test sees many orders of its threads, the same ones each time.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

pub(crate) use shuttle::future::block_on;
use shuttle::rand::Rng as _;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
pub(crate) use shuttle::sync::atomic::AtomicBool;
pub(crate) use shuttle::sync::{Mutex, MutexGuard, mpsc};
pub(crate) use shuttle::thread;
use shuttle::{Config, Runner};
use tokio::sync::oneshot::Receiver;
use tokio::sync::oneshot::error::RecvError;

/// Runs of each test with each scheduler.
const RUNS: usize = 1000;

/// Changes of priority in a run, at most. Most bugs need few.
const DEPTH: usize = 3;

/// Bytes of a thread's stack; code that is not optimised needs more than shuttle's default.
const STACK: usize = 256 << 10;

/// A longer time never ends in the model.
const SOON: Duration = Duration::from_secs(1);

pub(crate) fn check(test: impl Fn() + Send + Sync + 'static) {
    let test = Arc::new(move || {
        // The second scheduler refuses what has one thread only.
        let other = thread::spawn(|| {});
        test();
        other.join().expect("the thread ends");
    });
    run(RandomScheduler::new_from_seed(1, RUNS), Arc::clone(&test));
    run(PctScheduler::new_from_seed(2, DEPTH, RUNS), test);
}

fn run(scheduler: impl Scheduler + 'static, test: Arc<impl Fn() + Send + Sync + 'static>) {
    let mut config = Config::new();
    config.stack_size = STACK;
    Runner::new(scheduler, config).run(move || test());
}

/// As tokio's, but a short time ends at any moment, whatever the clock says.
pub(crate) async fn timeout<F: Future>(wait: Duration, future: F) -> Result<F::Output, ()> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Ok(output)),
        Poll::Pending if wait >= SOON => Poll::Pending,
        Poll::Pending if shuttle::rand::thread_rng().gen_bool(0.3) => Poll::Ready(Err(())),
        Poll::Pending => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

pub(crate) fn receive<T>(receiver: Receiver<T>) -> Result<T, RecvError> {
    block_on(receiver)
}
