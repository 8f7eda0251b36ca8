//! What the handlers share: the served model, once there is one.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use tidegate_model::SamplingParams;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;
use crate::engine::{EngineHandle, Limits};
use crate::text::Tokenizer;

/// A model that is being served.
pub struct Served {
    /// The name that requests may give as `model`.
    pub name: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Changes when the weights or the server do; OpenAI's `system_fingerprint`.
    pub fingerprint: String,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The bounds on each request.
    pub limits: Limits,
    /// What holds where a request says nothing.
    pub sampling: SamplingParams,
    /// Where requests go.
    pub engine: EngineHandle,
}

impl Served {
    /// Refuses a model of any other name.
    pub(super) fn check_name(&self, name: &str, param: Option<&str>) -> Result<(), ApiError> {
        if name == self.name {
            return Ok(());
        }
        let message = format!("the model `{name}` does not exist; this server has `{}`", self.name);
        Err(ApiError::request(StatusCode::NOT_FOUND, param, Some("model_not_found"), message))
    }
}

/// Settings of the HTTP side.
#[derive(Clone, Copy, Debug)]
pub struct ApiOptions {
    /// Longest body that is read.
    pub max_body_bytes: usize,
    /// Pause in a stream after which a comment shows that it is alive.
    pub keep_alive: Duration,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self { max_body_bytes: 4 << 20, keep_alive: Duration::from_secs(15) }
    }
}

/// The state of the application; cheap to clone.
#[derive(Clone)]
pub struct AppState {
    inner: Arc<Inner>,
}

struct Inner {
    options: ApiOptions,
    served: OnceLock<Arc<Served>>,
    draining: AtomicBool,
    /// One permit for each core: reading many long requests at once makes none of them faster.
    readers: Arc<Semaphore>,
}

impl AppState {
    /// A server without a model yet: alive, but not ready.
    pub fn new(options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let readers = Arc::new(Semaphore::new(cores));
        let inner = Inner { options, served: OnceLock::new(), draining: AtomicBool::new(false), readers };
        Self { inner: Arc::new(inner) }
    }

    /// Begins to serve a model; the first stays. Returns the one that is served.
    pub fn serve(&self, served: Served) -> &Served {
        let served = self.inner.served.get_or_init(|| Arc::new(served));
        // Whichever of this and `drain` comes second sees what the other did.
        if self.inner.draining.load(Ordering::SeqCst) {
            served.engine.drain();
        }
        served
    }

    /// Takes no more requests; those that run are finished.
    pub fn drain(&self) {
        self.inner.draining.store(true, Ordering::SeqCst);
        if let Some(served) = self.inner.served.get() {
            served.engine.drain();
        }
    }

    /// Ends what still runs.
    pub fn abort(&self) {
        if let Some(served) = self.inner.served.get() {
            served.engine.abort();
        }
    }

    pub(super) fn options(&self) -> &ApiOptions {
        &self.inner.options
    }

    /// Waits for the leave to read a request. `None` never comes: nobody closes the semaphore.
    pub(super) async fn reader(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.readers).acquire_owned().await.ok()
    }

    /// The model, where it can take requests.
    pub(super) fn ready(&self) -> Result<&Arc<Served>, ApiError> {
        let unavailable = |code, message| Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, code, message));
        if self.inner.draining.load(Ordering::SeqCst) {
            return unavailable("shutting_down", "the server is shutting down");
        }
        match self.inner.served.get() {
            None => unavailable("loading", "the model is being loaded, try again soon"),
            Some(served) if served.engine.is_ready() => Ok(served),
            Some(_) => unavailable("engine_stopped", "the engine does not step"),
        }
    }
}
