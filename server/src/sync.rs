//! Locks, channels and threads for code that also runs under a concurrency model checker. The model includes that code
//! with another module in place of this one (`server/tests/store/models.rs`).

pub(crate) use std::sync::atomic::AtomicBool;
pub(crate) use std::sync::{Mutex, MutexGuard, mpsc};
pub(crate) use std::thread;

use tokio::sync::oneshot::Receiver;
use tokio::sync::oneshot::error::RecvError;
pub(crate) use tokio::time::timeout;

/// Blocks this thread until the message arrives.
pub(crate) fn receive<T>(receiver: Receiver<T>) -> Result<T, RecvError> {
    receiver.blocking_recv()
}

/// Runs a test: once here; under the model checker, with many orders of its threads.
#[cfg(test)]
pub(crate) fn check(test: impl Fn() + Send + Sync + 'static) {
    test();
}

/// Blocks this thread until the future is ready.
#[cfg(test)]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(future)
}
