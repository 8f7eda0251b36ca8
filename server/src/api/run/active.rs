//! The runs in progress, and what ends them from outside: a client, the deletion of their session, the removal of their
//! key, or the server's shutdown.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::api::auth::context::AuthContext;
use crate::api::error::ApiError;
use crate::engine::Failure;
use crate::session::SessionId;

/// Why a run is ended early. Of two reasons, the one declared later prevails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::api) enum Stop {
    /// The run is given up, so that another server can take it over.
    Released,
    /// The run ends with the text so far, as if by `max_tokens`, and is committed.
    Finish,
    /// The server is shutting down.
    ShuttingDown,
    /// The run's session was deleted.
    SessionDeleted,
    /// The request's key was removed.
    KeyRevoked,
}

impl Stop {
    /// Returns the error that ends the run; `None` if the run finishes or is given up.
    pub(in crate::api) fn error(self) -> Option<ApiError> {
        match self {
            Self::Released | Self::Finish => None,
            Self::ShuttingDown => Some(Failure::ShuttingDown.into()),
            Self::SessionDeleted => {
                let message = "the session was deleted during the turn, which is not committed";
                let (status, code) = (StatusCode::NOT_FOUND, "session_deleted");
                Some(ApiError::request(status, Some("session"), Some(code), message))
            }
            Self::KeyRevoked => {
                let message = "the API key of this request was removed while it was running; nothing is committed";
                Some(ApiError::request(StatusCode::UNAUTHORIZED, None, Some("invalid_api_key"), message))
            }
        }
    }
}

/// A handle that stops one run.
#[derive(Clone, Debug)]
pub(in crate::api) struct StopHandle(Arc<watch::Sender<Option<Stop>>>);

impl StopHandle {
    /// Stops the run, unless it has been stopped for a stronger reason.
    pub(in crate::api) fn stop(&self, reason: Stop) {
        self.0.send_if_modified(|stop| {
            let stronger = Some(reason) > *stop;
            if stronger {
                *stop = Some(reason);
            }
            stronger
        });
    }
}

/// What decides whether a stop concerns a run.
pub(in crate::api) struct Described {
    /// The session that the run is a turn of.
    pub(in crate::api) session: Option<SessionId>,
    /// The request's key; `None` if the server has no keys.
    pub(in crate::api) auth: Option<Arc<AuthContext>>,
    /// How a shutdown stops the run.
    pub(in crate::api) at_shutdown: Stop,
}

/// The runs in progress.
#[derive(Clone, Default)]
pub(in crate::api) struct ActiveRuns(Arc<Mutex<Runs>>);

#[derive(Default)]
struct Runs {
    next: u64,
    by_number: HashMap<u64, (Described, StopHandle)>,
}

/// Registers a run as one that can be stopped, until it is dropped.
pub(in crate::api) struct Registration {
    runs: ActiveRuns,
    number: u64,
    handle: StopHandle,
    stop: watch::Receiver<Option<Stop>>,
    /// The run's deadline; `None` if it has none, or once it has passed.
    over: Option<Instant>,
}

impl ActiveRuns {
    /// Adds a run, which is told to finish after `limit`.
    pub(in crate::api) fn register(&self, run: Described, limit: Option<Duration>) -> Registration {
        let (sender, stop) = watch::channel(None);
        let handle = StopHandle(Arc::new(sender));
        let mut runs = self.lock();
        let number = runs.next;
        runs.next += 1;
        runs.by_number.insert(number, (run, handle.clone()));
        let over = limit.and_then(|limit| Instant::now().checked_add(limit));
        Registration { runs: self.clone(), number, handle, stop, over }
    }

    /// Ends the turns of a session that was deleted.
    pub(in crate::api) fn session_deleted(&self, id: &SessionId) {
        self.stop(|run| (run.session.as_ref() == Some(id)).then_some(Stop::SessionDeleted));
    }

    /// Ends the runs whose keys `is_valid` rejects.
    pub(in crate::api) fn keys_changed(&self, is_valid: impl Fn(&AuthContext) -> bool) {
        self.stop(|run| run.auth.as_ref().is_some_and(|auth| !is_valid(auth)).then_some(Stop::KeyRevoked));
    }

    /// Gives up the runs that another server can take over.
    pub(in crate::api) fn give_up(&self) {
        self.stop(|run| Some(run.at_shutdown).filter(|stop| *stop == Stop::Released));
    }

    /// Ends all runs. Runs that a disconnect would not undo are given up, or committed with the text so far.
    pub(in crate::api) fn shut_down(&self) {
        self.stop(|run| Some(run.at_shutdown));
    }

    fn stop(&self, reason: impl Fn(&Described) -> Option<Stop>) {
        for (run, handle) in self.lock().by_number.values() {
            if let Some(reason) = reason(run) {
                handle.stop(reason);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Runs> {
        // No code panics while holding this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registration {
    /// Returns a handle that stops the run.
    pub(super) fn handle(&self) -> StopHandle {
        self.handle.clone()
    }

    /// Waits until the run is stopped or its deadline passes. If it has been stopped before, waits for a stronger
    /// reason. Cancel-safe.
    pub(in crate::api) async fn stopped(&mut self) -> Stop {
        let Self { stop, over, .. } = self;
        let changed = async {
            loop {
                // The sender lives as long as `self`.
                if stop.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
                if let Some(reason) = *stop.borrow_and_update() {
                    return reason;
                }
            }
        };
        tokio::select! {
            reason = changed => reason,
            () = sleep_until(over.unwrap_or_else(Instant::now)), if over.is_some() => {
                *over = None;
                Stop::Finish
            }
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.runs.lock().by_number.remove(&self.number);
    }
}
