//! Replaces the server's module `sync` in the files that `models` includes. At each of these operations, shuttle
//! decides which thread runs next, so a test sees many thread interleavings, and the same ones in each run.

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

/// How often each scheduler runs a test.
const RUNS: usize = 1000;

/// Maximum number of priority changes in a run. Most bugs need only a few.
const DEPTH: usize = 3;

/// Size of a thread's stack in bytes. Unoptimized code needs more than shuttle's default.
const STACK: usize = 256 << 10;

/// A timeout of this length or more never expires in the model.
const SOON: Duration = Duration::from_secs(1);

pub(crate) fn check(test: impl Fn() + Send + Sync + 'static) {
    let test = Arc::new(move || {
        // The second scheduler refuses a test with only one thread.
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

/// Like tokio's `timeout`, except that a short timeout may expire at any moment, whatever the clock says.
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
