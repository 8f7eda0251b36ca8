//! The state that all handlers share: options, keys, metrics, and the models and stores once they are open.

use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::watch;

use super::auth::keys::{ActiveKeys, Keys};
use super::auth::owner;
use super::error::ApiError;
use super::fair::{FairGate, Full, GateLimits, Permit};
use super::memory::{BodyMemory, ResponseMemory};
use super::middleware::cors::Origin;
use super::middleware::hosts::AllowedHosts;
use super::models::{Instance, Loader, ModelOptions, ModelSource, Models};
use crate::api::run::active::ActiveRuns;
use crate::api::run::idempotency::InFlight;
use crate::api::run::streams::Streams;
use crate::api::run::waiters::Waiters;
use crate::metrics::Metrics;
use crate::session::Store;
use crate::text::MAX_COMPILERS;

pub use super::served::Served;

/// Requests of one owner that may wait to be parsed; each holds its body in memory.
const MAX_READING: usize = 1024;

/// Requests of one owner that may wait for their grammars to be compiled.
const MAX_COMPILING: usize = 256;

/// Options of the API.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// Idle time in a stream after which a comment keeps the connection alive.
    pub keep_alive: Duration,
    /// Time limit for receiving a request body.
    pub body_limit: Duration,
    /// Most bytes of text in a response that is not streamed.
    pub max_text_bytes: usize,
    /// Time limit for generation, including the wait for a slot. When it passes, the text ends early. A turn of a
    /// session always reads its whole prompt.
    pub max_time: Option<Duration>,
    /// Origins whose pages may read responses (CORS).
    pub cors: Vec<Origin>,
    /// The host names that the server accepts.
    pub hosts: AllowedHosts,
    /// Whether metrics are served at the admin address instead of with the API.
    pub metrics_at_admin: bool,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            max_body_bytes: 4 << 20,
            max_text_bytes: 16 << 20,
            keep_alive: Duration::from_secs(15),
            body_limit: Duration::from_mins(1),
            max_time: Some(Duration::from_hours(1)),
            cors: Vec::new(),
            hosts: AllowedHosts::default(),
            metrics_at_admin: false,
        }
    }
}

/// The state that all handlers share; cheap to clone.
#[derive(Clone)]
pub struct AppState {
    inner: Arc<Inner>,
    /// The model of the request; `None` if it is not known yet, and on a server with one model.
    model: Option<Arc<Instance>>,
}

struct Inner {
    options: ApiOptions,
    api_keys: ActiveKeys,
    /// The model of a server that has only one.
    only: OnceLock<Arc<Instance>>,
    /// The sessions of the only model, opened before it is served.
    store: OnceLock<Store>,
    /// The models of a server that may have several.
    models: OnceLock<Models>,
    draining: AtomicBool,
    /// Permits to parse and tokenize requests. One owner may hold one per core; one more is left for the others.
    readers: FairGate,
    /// Permits for long requests, which run at a lower priority. One owner may hold one for every two cores.
    long_readers: FairGate,
    /// Permits to compile grammars. Each owner may hold one.
    compilers: FairGate,
    waiters: Waiters,
    response_memory: ResponseMemory,
    body_memory: BodyMemory,
    active_runs: ActiveRuns,
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
    /// Creates the state of a server that has no model yet: alive, but not ready.
    pub fn new(options: ApiOptions) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let half = cores.div_ceil(2);
        let readers = FairGate::new(GateLimits { permits: cores + 1, held: cores, waiting: MAX_READING });
        let long_readers = FairGate::new(GateLimits { permits: half + 1, held: half, waiting: MAX_READING });
        let compilers = FairGate::new(GateLimits { permits: MAX_COMPILERS, held: 1, waiting: MAX_COMPILING });
        let (waiters, active_runs) = (Waiters::default(), ActiveRuns::default());
        let (streams, in_flight, runs) = (Streams::default(), InFlight::default(), watch::Sender::new(0));
        let (only, store, models) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let draining = AtomicBool::new(false);
        let (api_keys, metrics) = (ActiveKeys::default(), Arc::new(Metrics::new()));
        let inner = Inner {
            options,
            api_keys,
            only,
            store,
            models,
            draining,
            readers,
            long_readers,
            compilers,
            waiters,
            response_memory: ResponseMemory::default(),
            body_memory: BodyMemory::default(),
            active_runs,
            streams,
            in_flight,
            runs,
            metrics,
        };
        Self { inner: Arc::new(inner), model: None }
    }

    /// Requires one of `keys` from now on, in place of earlier keys, and ends the running requests of keys that are no
    /// longer valid. Call it before serving: without keys, every request is allowed.
    pub fn set_api_keys(&self, keys: Keys) {
        self.inner.api_keys.set(keys);
        self.expect_tenants();
        if let Some(keys) = self.inner.api_keys.get() {
            self.inner.active_runs.keys_changed(|auth| auth.is_valid(&keys));
        }
    }

    /// Tells the engines how many keys share them.
    fn expect_tenants(&self) {
        let Some(keys) = self.inner.api_keys.get() else { return };
        if let Some(only) = self.inner.only.get() {
            only.served.engine.expect_tenants(keys.generating());
        }
        if let Some(models) = self.inner.models.get() {
            models.expect_tenants(keys.generating());
        }
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
        for store in self.stores() {
            if let Err(error) = store.close().await {
                tracing::error!("lost the sessions that were only in memory: {error}");
            }
        }
    }

    /// Every session store that is open.
    pub(super) fn stores(&self) -> Vec<Store> {
        let several = self.inner.models.get().map(Models::all_stores).unwrap_or_default();
        self.inner.store.get().cloned().into_iter().chain(several).collect()
    }

    /// Sets the session store; later calls have no effect. Call it before [`Self::serve`].
    pub fn set_store(&self, store: Store) {
        self.inner.store.get_or_init(|| store);
    }

    /// Starts serving the only model and returns it; later calls have no effect and return the first model.
    pub fn serve(&self, served: Served) -> &Served {
        let store = self.inner.store.get().cloned();
        let only = self.inner.only.get_or_init(|| Arc::new(Instance::only(served, store)));
        self.expect_tenants();
        // Whichever of this and `drain` runs later sees the effect of the other.
        if self.inner.draining.load(Ordering::SeqCst) {
            only.served.engine.drain();
        }
        &only.served
    }

    /// Starts serving several models; the first is the default. There must be at least one, and their names must
    /// differ. Returns once each has been opened. Later calls have no effect.
    ///
    /// # Errors
    /// The default model cannot be loaded. Failures of other models are only logged.
    pub async fn serve_models(
        &self,
        sources: Vec<ModelSource>,
        options: ModelOptions,
        loader: Arc<dyn Loader>,
    ) -> Result<(), String> {
        let models = self.inner.models.get_or_init(|| Models::new(sources, options, loader));
        self.expect_tenants();
        if self.inner.draining.load(Ordering::SeqCst) {
            models.drain();
        }
        models.start().await.map_err(|error| error.message().to_owned())
    }

    /// Replaces the list of models, and returns the names of those that were loaded because they are new or their
    /// folder has changed. Running requests finish with the model that they began with.
    pub async fn reload_models(&self, sources: Vec<ModelSource>) -> Vec<String> {
        match self.inner.models.get() {
            Some(models) => models.reload(sources).await,
            None => Vec::new(),
        }
    }

    /// Waits until the engines of a server with several models have ended. Call [`Self::drain`] first.
    pub async fn engines_ended(&self) {
        if let Some(models) = self.inner.models.get() {
            models.ended().await;
        }
    }

    /// The models of a server that may have several.
    pub(super) fn models(&self) -> Option<&Models> {
        self.inner.models.get()
    }

    /// Returns the state bound to this model.
    pub(super) fn bound(&self, model: Arc<Instance>) -> Self {
        Self { inner: Arc::clone(&self.inner), model: Some(model) }
    }

    /// The model of the request.
    pub(super) fn instance(&self) -> Option<&Arc<Instance>> {
        self.model.as_ref().or_else(|| self.inner.only.get())
    }

    /// Refuses new requests; running ones finish, except those that another server can take over.
    pub fn drain(&self) {
        self.inner.draining.store(true, Ordering::SeqCst);
        self.inner.active_runs.give_up();
        if let Some(only) = self.inner.only.get() {
            only.served.engine.drain();
        }
        if let Some(models) = self.inner.models.get() {
            models.drain();
        }
    }

    /// Whether the server is shutting down.
    pub(super) fn is_draining(&self) -> bool {
        self.inner.draining.load(Ordering::SeqCst)
    }

    /// Ends all running requests soon. Turns that a disconnect would not undo are committed with the text so far; the
    /// others change nothing. Call [`Self::drain`] first.
    pub fn finish_turns(&self) {
        self.inner.active_runs.shut_down();
    }

    /// Ends all running requests; nothing is committed.
    pub fn abort(&self) {
        if let Some(only) = self.inner.only.get() {
            only.served.engine.abort();
        }
        if let Some(models) = self.inner.models.get() {
            models.abort();
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

    /// Returns the session store of the model, or an error if there is none.
    pub(super) fn store(&self) -> Result<&Store, ApiError> {
        let store = self.instance().and_then(|instance| instance.store.as_ref());
        if let Some(store) = store.or_else(|| self.inner.store.get()) {
            return Ok(store);
        }
        // Without a model yet, a store may still be opened: the error is then that the model is loading.
        self.loaded()?;
        let message = "this server has no session store";
        Err(ApiError::server(StatusCode::NOT_IMPLEMENTED, "no_store", message))
    }

    pub(super) fn options(&self) -> &ApiOptions {
        &self.inner.options
    }

    /// The requests that wait for sessions in use.
    pub(super) fn waiters(&self) -> &Waiters {
        &self.inner.waiters
    }

    /// The memory that responses hold.
    pub(super) fn response_memory(&self) -> &ResponseMemory {
        &self.inner.response_memory
    }

    /// The memory that bodies take.
    pub(super) fn body_memory(&self) -> &BodyMemory {
        &self.inner.body_memory
    }

    /// The runs that can be stopped.
    pub(super) fn active_runs(&self) -> &ActiveRuns {
        &self.inner.active_runs
    }

    /// Waits for a permit to parse a request; `long` says whether that takes long.
    pub(super) async fn reader(&self, long: bool) -> Result<Permit, ApiError> {
        let full = |Full { waiting }| {
            let message = format!("{waiting} requests of yours already wait to be read");
            ApiError::rate_limit("too_many_waiting", message)
        };
        let readers = if long { &self.inner.long_readers } else { &self.inner.readers };
        readers.acquire(owner::current()).await.map_err(full)
    }

    /// Waits for a permit to compile the grammar `param`.
    pub(super) async fn compiler(&self, param: &str) -> Result<Permit, ApiError> {
        let full = |Full { waiting }| {
            let message = format!("{param} cannot be compiled now: {waiting} other grammars of yours wait already");
            ApiError::rate_limit("grammars_busy", message)
        };
        self.inner.compilers.acquire(owner::current()).await.map_err(full)
    }

    /// Returns the model, even while it takes no requests.
    pub(super) fn loaded(&self) -> Result<&Arc<Served>, ApiError> {
        match self.instance() {
            Some(instance) => Ok(&instance.served),
            None => self.ready(),
        }
    }

    /// Returns the model, if it takes requests. With several models, its engine may still have to be started.
    pub(super) fn ready(&self) -> Result<&Arc<Served>, ApiError> {
        let unavailable = |code, message| Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, code, message));
        if self.is_draining() {
            return unavailable("shutting_down", "the server is shutting down");
        }
        match self.instance() {
            None => unavailable("loading", "the model is loading, try again soon"),
            Some(instance) if instance.is_asleep() || instance.served.engine.is_ready() => Ok(&instance.served),
            Some(_) => unavailable("engine_stopped", "the engine has stopped"),
        }
    }
}
