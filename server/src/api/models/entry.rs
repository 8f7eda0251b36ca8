//! A model of the list: its state, its last use, and the memory that it takes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tracing::error;

use super::instance::{Instance, ModelSource};
use crate::api::error::ApiError;

/// How long to wait after a failure before the model may be loaded again.
const PAUSE: Duration = Duration::from_secs(30);

/// The current state of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::api) enum ModelState {
    Loaded,
    Loading,
    Unloaded,
    Failed,
}

/// A model of the list.
pub(in crate::api) struct Entry {
    pub(super) source: ModelSource,
    status: Mutex<Status>,
}

#[derive(Default)]
pub(super) struct Status {
    /// The last instance, which may be asleep.
    pub(super) instance: Option<Arc<Instance>>,
    pub(super) is_loading: bool,
    /// Why the last attempt to load it or run it failed, and when.
    pub(super) failure: Option<(String, Instant)>,
    /// The time of its last use, by the registry's clock, which counts uses.
    pub(super) used: u64,
    /// Bytes of its weights and slots while it is loaded.
    pub(super) bytes: u64,
    pub(super) loads: u64,
    pub(super) unloads: u64,
}

impl Entry {
    pub(super) fn new(source: ModelSource) -> Arc<Self> {
        Arc::new(Self { source, status: Mutex::default() })
    }

    pub(in crate::api) fn name(&self) -> &str {
        &self.source.name
    }

    /// Returns the last instance, which may be asleep; `None` if the model could never be loaded.
    pub(in crate::api) fn instance(&self) -> Option<Arc<Instance>> {
        self.lock().instance.clone()
    }

    pub(in crate::api) fn state(&self) -> ModelState {
        let status = self.lock();
        match &status.instance {
            Some(instance) if !instance.is_asleep() => ModelState::Loaded,
            _ if status.is_loading => ModelState::Loading,
            _ if status.failure.is_some() => ModelState::Failed,
            _ => ModelState::Unloaded,
        }
    }

    /// Returns how often the model was loaded and unloaded.
    pub(in crate::api) fn changes(&self) -> (u64, u64) {
        let status = self.lock();
        (status.loads, status.unloads)
    }

    /// Returns the last instance, and notes that it is used at `now`.
    pub(super) fn use_at(&self, now: u64) -> Option<Arc<Instance>> {
        let mut status = self.lock();
        status.used = now;
        status.instance.clone()
    }

    /// Returns the bytes that the model takes now, and the time of its last use if it is idle.
    pub(super) fn use_of_memory(&self) -> (u64, Option<u64>) {
        let status = self.lock();
        match &status.instance {
            Some(instance) if !instance.is_asleep() => {
                let idle = Arc::strong_count(instance) == 1;
                (status.bytes, idle.then_some(status.used))
            }
            _ => (0, None),
        }
    }

    /// Puts the instance to sleep if it is idle, and returns it. While this holds the lock, nothing can begin to use
    /// it.
    pub(super) fn put_to_sleep(&self) -> Option<Arc<Instance>> {
        let mut status = self.lock();
        let instance = Arc::clone(status.instance.as_ref().filter(|it| Arc::strong_count(it) == 1 && !it.is_asleep())?);
        instance.asleep.store(true, Ordering::SeqCst);
        status.unloads += 1;
        Some(instance)
    }

    /// Refuses to load the model again soon after a failure.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        match &self.lock().failure {
            Some((reason, at)) if at.elapsed() < PAUSE => Err(self.refusal(reason)),
            _ => Ok(()),
        }
    }

    /// Logs and records why the model cannot be loaded, and returns the error for the client.
    pub(super) fn fail(&self, reason: String) -> ApiError {
        error!("the model {} cannot be loaded: {reason}", self.name());
        let refusal = self.refusal(&reason);
        self.lock().failure = Some((reason, Instant::now()));
        refusal
    }

    fn refusal(&self, reason: &str) -> ApiError {
        let message = format!("the model `{}` cannot be loaded: {reason}", self.name());
        unavailable("model_failed", message).retried_after(PAUSE.as_secs())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Status> {
        // Nothing panics while it holds the lock.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks a model as loading until this guard is dropped.
pub(super) struct Loading<'a>(&'a Entry);

impl<'a> Loading<'a> {
    pub(super) fn new(entry: &'a Entry) -> Self {
        entry.lock().is_loading = true;
        Self(entry)
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.lock().is_loading = false;
    }
}

pub(super) fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::server(StatusCode::SERVICE_UNAVAILABLE, code, message)
}
