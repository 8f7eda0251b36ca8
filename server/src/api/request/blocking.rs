//! Runs work that would hold up other connections, such as parsing and encoding a long prompt.

use std::cell::RefCell;
use std::sync::Arc;
use std::thread;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::api::auth::context::{self, AuthContext};
use crate::api::error::ApiError;
use crate::api::fair::Permit;
use crate::api::state::AppState;
use crate::priority;

/// Work on more bytes than this is long: it can take more than a few milliseconds.
const LONG: usize = 64 << 10;

thread_local! {
    /// The request that this thread works for.
    static TURN: RefCell<Option<Turn>> = const { RefCell::new(None) };
}

struct Turn {
    permit: Permit,
    context: Option<Arc<AuthContext>>,
}

/// Ends this thread's turn when it is dropped, even by a panic.
struct TurnEnd;

impl Drop for TurnEnd {
    fn drop(&mut self) {
        TURN.take();
    }
}

/// Whether work on this many bytes is long.
pub(in crate::api) fn is_long(bytes: usize) -> bool {
    bytes > LONG
}

/// Runs `work`, which processes `bytes` bytes, on a thread that may block, when it is its owner's turn. Owners take
/// turns, even in the middle of work that calls [`pause`].
///
/// Long work runs at a lower priority, so that it delays neither the engine nor short requests. It has its own permits,
/// so that short work never waits for work that is slowed down.
pub(in crate::api) async fn run_blocking<T: Send + 'static>(
    state: &AppState,
    bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let long = is_long(bytes);
    let (permit, context) = (state.reader(long).await?, context::current());
    let work = move || {
        // Held until the work ends, even if the client disconnects before.
        TURN.set(Some(Turn { permit, context }));
        let _end = TurnEnd;
        work()
    };
    if long { give_way(work).await? } else { spawn_blocking(work).await.map_err(|_| ApiError::internal())? }
}

/// Runs `work` at a lower priority, on a thread of its own, because a thread cannot raise its priority again.
async fn give_way<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let (sender, receiver) = oneshot::channel();
    let runtime = Handle::current();
    let spawned = thread::Builder::new().name("long-work".into()).spawn(move || {
        priority::lower_thread();
        let _runtime = runtime.enter();
        // The client may have disconnected.
        let _ = sender.send(work());
    });
    // If the thread could not be spawned, or panicked, the sender is dropped and the receiver fails.
    drop(spawned);
    receiver.await.map_err(|_| ApiError::internal())
}

/// Lets the requests of other owners take their turns. Call it between pieces of long work.
pub(in crate::api) fn pause() {
    TURN.with_borrow_mut(|turn| {
        if let Some(turn) = turn {
            turn.permit.pass();
        }
    });
}

/// Charges the key for tokens that were read for a request that is refused.
pub(in crate::api) fn charge(tokens: usize) {
    let context = TURN.with_borrow(|turn| turn.as_ref().and_then(|turn| turn.context.clone()));
    if let Some(context) = context {
        context.charge(tokens);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::api::state::ApiOptions;

    fn state() -> AppState {
        AppState::new(ApiOptions::default())
    }

    /// Takes all permits that an owner gets without waiting.
    fn permits(state: &AppState, long: bool) -> Vec<Permit> {
        std::iter::from_fn(|| state.reader(long).now_or_never()).map(Result::unwrap).collect()
    }

    #[test]
    fn long_work_leaves_an_owner_its_permits_for_short_work_and_half_of_the_cores() {
        let (state, cores) = (state(), thread::available_parallelism().map_or(1, NonZero::get));
        let long = permits(&state, true);
        assert_eq!(long.len(), cores.div_ceil(2));
        assert_eq!(permits(&state, false).len(), cores);
    }

    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn long_work_gives_way_and_short_work_after_it_does_not() {
        use rustix::process::getpriority_process;
        let (state, usual) = (state(), getpriority_process(None).unwrap());
        let niceness =
            async |bytes| run_blocking(&state, bytes, || Ok(getpriority_process(None).unwrap())).await.unwrap();
        assert!(niceness(LONG + 1).await > usual);
        assert_eq!(niceness(LONG).await, usual);
    }

    #[tokio::test]
    async fn long_work_that_panics_fails_its_own_request_and_returns_its_permit() {
        let state = state();
        for _ in 0..10 {
            let outcome = run_blocking::<()>(&state, LONG + 1, || panic!("as a test")).await;
            assert_eq!(outcome.unwrap_err().status().as_u16(), 500);
        }
        assert!(run_blocking(&state, LONG + 1, || Ok(())).await.is_ok());
    }
}
