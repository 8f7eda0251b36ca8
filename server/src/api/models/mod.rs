//! The models of a server that has several: which of them are loaded, and how they are loaded and unloaded. `select.rs`
//! decides which of them a request means.
//!
//! Every model is loaded once when the server starts, so that a wrong folder shows then, and so that its sessions can
//! be found. After that, the models that fit into the budget stay loaded; the others keep their tokenizers and their
//! stores.

mod entry;
mod instance;
mod load;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::ApiError;
use crate::session::{Fingerprint, Store};
use entry::unavailable;

pub(super) use entry::{Entry, ModelState};
pub(super) use instance::Instance;
pub use instance::{Loader, ModelSource};

/// Options that all models share.
#[derive(Clone, Copy, Debug)]
pub struct ModelOptions {
    /// Maximum bytes of the weights and slots of all loaded models.
    pub budget: u64,
    /// Whether unknown names mean the default model.
    pub any_name: bool,
}

/// The models of a server; cheap to clone.
#[derive(Clone)]
pub(super) struct Models(Arc<Inner>);

struct Inner {
    options: ModelOptions,
    loader: Arc<dyn Loader>,
    /// In the order in which they are listed; the first is the default one.
    entries: RwLock<Vec<Arc<Entry>>>,
    /// Instances that a reload has replaced and that may still be in use, with their bytes.
    replaced: Mutex<Vec<(Weak<Instance>, u64)>>,
    /// Every store that was opened. Models with the same files share one.
    stores: Mutex<Vec<(Fingerprint, Store)>>,
    /// Held while a model is loaded, so that only one is loaded at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
    clock: AtomicU64,
    /// How many API keys share the engines.
    tenants: AtomicUsize,
    closing: AtomicBool,
    started: AtomicBool,
    /// When the server started, in seconds since 1970.
    created: u64,
}

impl Models {
    /// Creates the list of models. None of them is loaded yet.
    pub(super) fn new(sources: Vec<ModelSource>, options: ModelOptions, loader: Arc<dyn Loader>) -> Self {
        Self(Arc::new(Inner {
            options,
            loader,
            entries: RwLock::new(sources.into_iter().map(Entry::new).collect()),
            replaced: Mutex::default(),
            stores: Mutex::default(),
            turn: Arc::default(),
            clock: AtomicU64::new(0),
            tenants: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            started: AtomicBool::new(false),
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        }))
    }

    /// Whether unknown names mean the default model.
    pub(super) fn any_name(&self) -> bool {
        self.0.options.any_name
    }

    /// When the server started, in seconds since 1970.
    pub(super) fn created(&self) -> u64 {
        self.0.created
    }

    pub(super) fn entries(&self) -> Vec<Arc<Entry>> {
        self.0.entries.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn named(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries().into_iter().find(|entry| entry.name() == name)
    }

    /// Returns the last instance of a model, and notes that it is used now; `None` if the model could never be loaded.
    pub(super) fn used(&self, entry: &Entry) -> Option<Arc<Instance>> {
        entry.use_at(self.tick())
    }

    /// Loads every model once, the default one last, so that it is loaded afterwards in any case.
    ///
    /// # Errors
    /// The default model cannot be loaded. Failures of other models are only in the log.
    pub(super) async fn start(&self) -> Result<(), ApiError> {
        let mut outcome = Ok(());
        for entry in self.entries().iter().rev() {
            outcome = self.awake(entry).await.map(drop);
        }
        self.0.started.store(true, Ordering::SeqCst);
        outcome
    }

    /// Checks that the server takes requests, whatever model they are for.
    pub(super) fn check_open(&self) -> Result<(), ApiError> {
        if self.0.closing.load(Ordering::SeqCst) {
            return Err(unavailable("shutting_down", "the server is shutting down"));
        }
        if !self.0.started.load(Ordering::SeqCst) {
            return Err(unavailable("loading", "the models are loading, try again soon"));
        }
        Ok(())
    }

    /// Checks that the default model takes requests, or would once it is loaded.
    pub(super) fn check_ready(&self) -> Result<(), ApiError> {
        self.check_open()?;
        let Some(entry) = self.entries().into_iter().next() else { return Ok(()) };
        match entry.instance() {
            Some(instance) if instance.is_asleep() => entry.check(),
            Some(instance) if instance.served.engine.is_ready() => Ok(()),
            Some(_) => Err(unavailable("engine_stopped", "the engine has stopped")),
            None => entry.check(),
        }
    }

    fn stores(&self) -> MutexGuard<'_, Vec<(Fingerprint, Store)>> {
        // Nothing panics while it holds the lock.
        self.0.stores.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns every store that was opened.
    pub(super) fn all_stores(&self) -> Vec<Store> {
        self.stores().iter().map(|(_, store)| store.clone()).collect()
    }

    /// Replaces the list of models. A model whose folder has changed is loaded before it replaces the served one, which
    /// stays if loading fails. Running requests finish on the instance that they use. Returns the names of the models
    /// that were loaded.
    pub(super) async fn reload(&self, sources: Vec<ModelSource>) -> Vec<String> {
        let mut loaded = Vec::new();
        let names: Vec<String> = sources.iter().map(|source| source.name.clone()).collect();
        for source in sources {
            let before = self.named(&source.name);
            if before.as_ref().is_some_and(|entry| entry.source == source) {
                continue;
            }
            let entry = Entry::new(source);
            let outcome = self.awake(&entry).await;
            if outcome.is_ok() {
                loaded.push(entry.name().to_owned());
            } else if before.is_some() {
                continue;
            }
            // The entry is added at once, so that loading the next model counts its memory.
            let mut list = self.entries();
            list.retain(|listed| listed.name() != entry.name());
            list.push(entry);
            self.set(list);
        }
        let place = |name: &str| names.iter().position(|listed| listed == name);
        let mut list = self.entries();
        list.retain(|entry| place(entry.name()).is_some());
        list.sort_by_key(|entry| place(entry.name()));
        self.set(list);
        loaded
    }

    /// Replaces the list. The engines of models that are no longer on it end with their last requests.
    fn set(&self, list: Vec<Arc<Entry>>) {
        let mut entries = self.0.entries.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *entries, list);
        for gone in before.iter().filter(|entry| !entries.iter().any(|kept| Arc::ptr_eq(kept, entry))) {
            let mut status = gone.lock();
            if let Some(instance) = status.instance.take().filter(|instance| !instance.is_asleep()) {
                self.replaced().push((Arc::downgrade(&instance), status.bytes));
            }
        }
    }

    fn replaced(&self) -> MutexGuard<'_, Vec<(Weak<Instance>, u64)>> {
        // Nothing panics while it holds the lock.
        self.0.replaced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the engines how many API keys share them.
    pub(super) fn expect_tenants(&self, tenants: usize) {
        self.0.tenants.store(tenants, Ordering::SeqCst);
        for instance in self.entries().iter().filter_map(|entry| entry.instance()) {
            instance.served.engine.expect_tenants(tenants);
        }
    }

    /// Stops loading models; running requests finish.
    pub(super) fn drain(&self) {
        self.0.closing.store(true, Ordering::SeqCst);
        self.all_awake().iter().for_each(|instance| instance.served.engine.drain());
    }

    /// Ends all running requests.
    pub(super) fn abort(&self) {
        self.all_awake().iter().for_each(|instance| instance.served.engine.abort());
    }

    /// Waits until all engines have ended. Call [`Self::drain`] first.
    pub(super) async fn ended(&self) {
        // Waits for a model that is being loaded, so that it is included.
        let _turn = self.0.turn.lock().await;
        for instance in self.all_awake() {
            instance.ended().await;
        }
    }

    /// Returns every instance with a running engine, including replaced ones.
    fn all_awake(&self) -> Vec<Arc<Instance>> {
        let listed: Vec<_> = self.entries().iter().filter_map(|entry| entry.instance()).collect();
        let replaced: Vec<_> = self.replaced().iter().filter_map(|(instance, _)| instance.upgrade()).collect();
        listed.into_iter().filter(|instance| !instance.is_asleep()).chain(replaced).collect()
    }

    fn tick(&self) -> u64 {
        self.0.clock.fetch_add(1, Ordering::Relaxed) + 1
    }
}
