//! What the handlers share: the served model, once there is one.

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
    /// Changes when the weights, the server or the kind of device do; OpenAI's `system_fingerprint`.
    pub fingerprint: String,
    /// Where the model computes, by its name.
    pub device: String,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The bounds on each request.
    pub limits: Limits,
    /// What holds where a request says nothing.
    pub sampling: SamplingParams,
    /// How messages become a text; none where the checkpoint has no template, or translates.
    pub template: Option<Arc<ChatTemplate>>,
    /// Makes the grammars that answers follow.
    pub grammars: Arc<Grammars>,
    /// How snapshots become bytes.
    pub codec: Arc<Codec>,
    /// Bytes of one conversation's state.
    pub state_bytes: u64,
    /// Beginnings of texts that need not be computed again.
    pub prefixes: Arc<PrefixIndex>,
    /// Where requests go.
    pub engine: EngineHandle,
}

impl Served {
    /// Whether a prompt is a source, which is translated, and not the beginning of a text.
    pub(super) fn reads_sources(&self) -> bool {
        self.limits.sources.is_some()
    }

    /// Refuses a model of any other name.
    pub(super) fn check_name(&self, name: &str, param: Option<&str>) -> Result<(), ApiError> {
        if name == self.name {
            return Ok(());
        }
        let message = format!("the model `{name}` does not exist; this server has `{}`", self.name);
        Err(ApiError::request(StatusCode::NOT_FOUND, param, Some("model_not_found"), message))
    }
}

/// Requests that may wait for sessions in use at once; each keeps its body in memory meanwhile.
const MOST_WAITERS: usize = 256;

/// Settings of the HTTP side.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Longest body that is read.
    pub max_body_bytes: usize,
    /// Pause in a stream after which a comment shows that it is alive.
    pub keep_alive: Duration,
    /// Time that a request's body may take to come.
    pub body_limit: Duration,
    /// Time that a request may make text, its wait for a slot included; then it ends with what there is. A turn of a
    /// conversation has its prompt read first.
    pub max_time: Option<Duration>,
    /// The origins of other pages that may read answers in a browser.
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

/// The state of the application; cheap to clone.
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
    /// One permit for each core: reading many long requests at once makes none of them faster.
    readers: Arc<Semaphore>,
    /// Requests that may wait for sessions that are in use.
    waiters: Arc<Semaphore>,
    streams: Streams,
    in_flight: InFlight,
    /// Counts the runs that have not ended.
    runs: watch::Sender<usize>,
    metrics: Arc<Metrics>,
}

/// A run that has not ended; dropped when it has.
pub(super) struct RunGuard(AppState);

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.0.inner.runs.send_modify(|runs| *runs -= 1);
    }
}

impl AppState {
    /// A server without a model yet: alive, but not ready.
    pub fn new(options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let (readers, waiters) = (Arc::new(Semaphore::new(cores)), Arc::new(Semaphore::new(MOST_WAITERS)));
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

    /// Waits until every run has ended, those without a client too. To be called after [`Self::drain`].
    pub async fn settle(&self) {
        // The sender lives as long as `self`.
        let _ = self.inner.runs.subscribe().wait_for(|runs| *runs == 0).await;
    }

    /// Makes durable what is kept.
    pub async fn close(&self) {
        if let Some(store) = self.inner.store.get()
            && let Err(error) = store.close().await
        {
            tracing::error!("what was in memory alone is lost: {error}");
        }
    }

    /// Keeps sessions in `store`; the first stays. To be called before [`Self::serve`].
    pub fn keep(&self, store: Store) {
        self.inner.store.get_or_init(|| store);
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

    pub(super) fn metrics(&self) -> &Arc<Metrics> {
        &self.inner.metrics
    }

    pub(super) fn streams(&self) -> &Streams {
        &self.inner.streams
    }

    pub(super) fn in_flight(&self) -> &InFlight {
        &self.inner.in_flight
    }

    /// Where sessions are kept.
    pub(super) fn store(&self) -> Result<&Store, ApiError> {
        let message = "this server keeps no sessions";
        self.inner.store.get().ok_or_else(|| ApiError::server(StatusCode::NOT_IMPLEMENTED, "no_store", message))
    }

    pub(super) fn options(&self) -> &ApiOptions {
        &self.inner.options
    }

    /// A place among those that wait for sessions in use.
    pub(super) fn waiter(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.inner.waiters).try_acquire_owned().map_err(|_| {
            let message = format!("{MOST_WAITERS} requests wait for sessions in use already");
            ApiError::request(StatusCode::TOO_MANY_REQUESTS, Some("prefer"), Some("too_many_waiting"), message)
        })
    }

    /// Waits for the leave to read a request. `None` never comes: nobody closes the semaphore.
    pub(super) async fn reader(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.inner.readers).acquire_owned().await.ok()
    }

    /// The model, whether or not it takes requests.
    pub(super) fn loaded(&self) -> Result<&Arc<Served>, ApiError> {
        match self.inner.served.get() {
            Some(served) => Ok(served),
            None => self.ready(),
        }
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
