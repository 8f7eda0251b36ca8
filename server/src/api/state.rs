//! The state that all handlers share: options, keys, metrics, and the model and the store once they are open.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use tidegate_model::SamplingParams;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::auth::keys::{ActiveKeys, Keys};
use super::error::ApiError;
use super::middleware::cors::Origin;
use crate::api::run::idempotency::InFlight;
use crate::api::run::streams::Streams;
use crate::engine::{EngineHandle, Limits};
use crate::metrics::Metrics;
use crate::session::{Codec, PrefixIndex, Store};
use crate::text::{ChatTemplate, Grammars, Tokenizer};

/// A model that is being served.
pub struct Served {
    /// The name that requests may give as `model`.
    pub name: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// OpenAI's `system_fingerprint`: changes with the weights, the server's version and the kind of device.
    pub fingerprint: String,
    /// The name of the device.
    pub device: String,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The limits of each request.
    pub limits: Limits,
    /// The sampling parameters of requests that set none.
    pub sampling: SamplingParams,
    /// The chat template; `None` if the checkpoint has none or is a translator.
    pub template: Option<Arc<ChatTemplate>>,
    /// Compiles grammars.
    pub grammars: Arc<Grammars>,
    /// Encodes and decodes snapshots.
    pub codec: Arc<Codec>,
    /// Size of one sequence's state in bytes.
    pub state_bytes: u64,
    /// The prefix cache.
    pub prefixes: Arc<PrefixIndex>,
    /// The engine.
    pub engine: EngineHandle,
}

impl Served {
    /// Whether the model is an encoder-decoder, whose prompts are sources to translate.
    pub(super) fn reads_sources(&self) -> bool {
        self.limits.sources.is_some()
    }

    /// Refuses requests for another model.
    pub(super) fn check_name(&self, name: &str, param: Option<&str>) -> Result<(), ApiError> {
        if name == self.name {
            return Ok(());
        }
        let message = format!("the model `{name}` does not exist; this server has `{}`", self.name);
        Err(ApiError::request(StatusCode::NOT_FOUND, param, Some("model_not_found"), message))
    }
}

/// Requests that may wait for sessions in use; each holds its body in memory.
const MAX_WAITERS: usize = 256;

/// Options of the API.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// Pause in a stream after which a comment keeps the connection alive.
    pub keep_alive: Duration,
    /// Time limit for receiving a request body.
    pub body_limit: Duration,
    /// Time limit for generating, including the wait for a slot; the text then ends early. A turn of a session always
    /// reads its whole prompt.
    pub max_time: Option<Duration>,
    /// Origins whose pages may read responses (CORS).
    pub cors: Vec<Origin>,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 4 << 20,
            keep_alive: Duration::from_secs(15),
            body_limit: Duration::from_mins(1),
            max_time: None,
            cors: Vec::new(),
        }
    }
}

/// The state that all handlers share; cheap to clone.
#[derive(Clone)]
pub struct AppState {
    inner: Arc<Inner>,
}

struct Inner {
    options: ApiOptions,
    api_keys: ActiveKeys,
    served: OnceLock<Arc<Served>>,
    store: OnceLock<Store>,
    draining: AtomicBool,
    /// One permit per core, for parsing and tokenizing long requests.
    readers: Arc<Semaphore>,
    /// Permits to wait for sessions in use.
    waiters: Arc<Semaphore>,
    streams: Streams,
    in_flight: InFlight,
    /// The number of active runs.
    runs: watch::Sender<usize>,
    metrics: Arc<Metrics>,
}

/// Counts an active run until it is dropped.
pub(super) struct RunGuard(AppState);

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.0.inner.runs.send_modify(|runs| *runs -= 1);
    }
}

impl AppState {
    /// The state of a server that has no model yet: alive, but not ready.
    pub fn new(options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let (readers, waiters) = (Arc::new(Semaphore::new(cores)), Arc::new(Semaphore::new(MAX_WAITERS)));
        let (streams, in_flight, runs) = (Streams::default(), InFlight::default(), watch::Sender::new(0));
        let (served, store, draining) = (OnceLock::new(), OnceLock::new(), AtomicBool::new(false));
        let (api_keys, metrics) = (ActiveKeys::default(), Arc::new(Metrics::new()));
        let inner =
            Inner { options, api_keys, served, store, draining, readers, waiters, streams, in_flight, runs, metrics };
        Self { inner: Arc::new(inner) }
    }

    /// Requires one of `keys` from now on, in place of earlier ones. Call it before serving: without keys, every request
    /// is allowed.
    pub fn set_api_keys(&self, keys: Keys) {
        self.inner.api_keys.set(keys);
    }

    pub(super) fn api_keys(&self) -> &ActiveKeys {
        &self.inner.api_keys
    }

    /// Counts a run until the guard is dropped.
    pub(super) fn run_begins(&self) -> RunGuard {
        self.inner.runs.send_modify(|runs| *runs += 1);
        RunGuard(self.clone())
    }

    /// Waits until every run has ended, including those whose client has disconnected. Call [`Self::drain`] first.
    pub async fn settle(&self) {
        // The sender lives as long as `self`.
        let _ = self.inner.runs.subscribe().wait_for(|runs| *runs == 0).await;
    }

    /// Writes all sessions to disk.
    pub async fn close(&self) {
        if let Some(store) = self.inner.store.get()
            && let Err(error) = store.close().await
        {
            tracing::error!("lost the sessions that were only in memory: {error}");
        }
    }

    /// Sets the session store; later calls have no effect. Call it before [`Self::serve`].
    pub fn set_store(&self, store: Store) {
        self.inner.store.get_or_init(|| store);
    }

    /// Starts serving a model and returns it; later calls have no effect and return the first model.
    pub fn serve(&self, served: Served) -> &Served {
        let served = self.inner.served.get_or_init(|| Arc::new(served));
        // Of this and `drain`, the later one sees the effect of the earlier.
        if self.inner.draining.load(Ordering::SeqCst) {
            served.engine.drain();
        }
        served
    }

    /// Refuses new requests; running ones finish.
    pub fn drain(&self) {
        self.inner.draining.store(true, Ordering::SeqCst);
        if let Some(served) = self.inner.served.get() {
            served.engine.drain();
        }
    }

    /// Ends all running requests.
    pub fn abort(&self) {
        if let Some(served) = self.inner.served.get() {
            served.engine.abort();
        }
    }

    pub(super) fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.metrics
    }

    pub(super) fn streams(&self) -> &Streams {
        &self.inner.streams
    }

    pub(super) fn in_flight(&self) -> &InFlight {
        &self.inner.in_flight
    }

    /// The session store, if there is one.
    pub(super) fn store(&self) -> Result<&Store, ApiError> {
        let message = "this server has no session store";
        self.inner.store.get().ok_or_else(|| ApiError::server(StatusCode::NOT_IMPLEMENTED, "no_store", message))
    }

    pub(super) fn options(&self) -> &ApiOptions {
        &self.inner.options
    }

    /// A permit to wait for a session in use.
    pub(super) fn waiter(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.inner.waiters).try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_WAITERS} requests already wait for sessions in use");
            ApiError::request(StatusCode::TOO_MANY_REQUESTS, Some("prefer"), Some("too_many_waiting"), message)
        })
    }

    /// Waits for a permit to parse a request. Never `None`: the semaphore is never closed.
    pub(super) async fn reader(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.readers).acquire_owned().await.ok()
    }

    /// The model, even while it takes no requests.
    pub(super) fn loaded(&self) -> Result<&Arc<Served>, ApiError> {
        match self.inner.served.get() {
            Some(served) => Ok(served),
            None => self.ready(),
        }
    }

    /// The model, if it takes requests.
    pub(super) fn ready(&self) -> Result<&Arc<Served>, ApiError> {
        let unavailable = |code, message| Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, code, message));
        if self.inner.draining.load(Ordering::SeqCst) {
            return unavailable("shutting_down", "the server is shutting down");
        }
        match self.inner.served.get() {
            None => unavailable("loading", "the model is loading, try again soon"),
            Some(served) if served.engine.is_ready() => Ok(served),
            Some(_) => unavailable("engine_stopped", "the engine has stopped"),
        }
    }
}
