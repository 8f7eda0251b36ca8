//! Loads models, and unloads the least recently used ones.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::spawn_blocking;
use tracing::{Instrument, info};

use super::Models;
use super::entry::{Entry, Loading, unavailable};
use super::instance::{Instance, Loader, ModelSource};
use crate::api::error::ApiError;
use crate::api::served::Served;
use crate::session::Store;

/// Seconds after which to retry a request for a model that there is no memory for.
const RETRY_BUSY: u64 = 5;

/// How often to look for an idle model, with a pause of [`LOOK_AGAIN`] between looks: most uses are short.
const LOOKS: usize = 20;
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Models {
    /// Returns the instance of a model, ready for requests. Loads it if necessary, and unloads idle models to make
    /// room.
    pub(in crate::api) async fn awake(&self, entry: &Arc<Entry>) -> Result<Arc<Instance>, ApiError> {
        if let Some(instance) = self.used(entry).filter(|instance| !instance.is_asleep()) {
            return Ok(instance);
        }
        entry.check()?;
        let turn = Arc::clone(&self.0.turn).lock_owned().await;
        // Another request may have loaded the model while this one waited.
        if let Some(instance) = self.used(entry).filter(|instance| !instance.is_asleep()) {
            return Ok(instance);
        }
        entry.check()?;
        let (models, entry) = (self.clone(), Arc::clone(entry));
        // Loading goes on if the client disconnects, because other requests may wait for it.
        let loading = async move {
            let _turn = turn;
            models.load(&entry).await
        };
        tokio::spawn(loading.in_current_span()).await.unwrap_or_else(|_| Err(ApiError::internal()))
    }

    async fn load(&self, entry: &Arc<Entry>) -> Result<Arc<Instance>, ApiError> {
        if self.0.closing.load(Ordering::SeqCst) {
            return Err(unavailable("shutting_down", "the server is shutting down"));
        }
        let _loading = Loading::new(entry);
        let known = entry.lock().bytes;
        let bytes = match known {
            0 => self.blocking(entry, Loader::size).await?,
            known => known,
        };
        self.make_room(entry, bytes).await?;
        let (served, thread) = self.blocking(entry, Loader::load).await?;
        let store = match self.store(&served).await {
            Ok(store) => store,
            Err(reason) => {
                served.engine.drain();
                return Err(entry.fail(format!("its session store cannot be opened: {reason}")));
            }
        };
        let tenants = self.0.tenants.load(Ordering::SeqCst);
        if tenants > 0 {
            served.engine.expect_tenants(tenants);
        }
        let memory = served.memory.weights + served.memory.slots;
        info!(memory_mib = memory >> 20, "loaded the model {} on {}", served.name, served.device);
        let instance = Arc::new(Instance::new(served, store, thread));
        {
            let mut status = entry.lock();
            (status.instance, status.failure) = (Some(Arc::clone(&instance)), None);
            (status.bytes, status.used) = (if memory > 0 { memory } else { bytes }, self.tick());
            status.loads += 1;
        }
        // Whichever comes later, this or `drain`, sees the effect of the other.
        if self.0.closing.load(Ordering::SeqCst) {
            instance.served.engine.drain();
        }
        self.watch(entry, &instance);
        Ok(instance)
    }

    /// Calls the loader on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        entry: &Arc<Entry>,
        work: impl FnOnce(&dyn Loader, &ModelSource) -> Result<T, String> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (loader, asked) = (Arc::clone(&self.0.loader), Arc::clone(entry));
        let done = spawn_blocking(move || work(&*loader, &asked.source)).await;
        done.unwrap_or_else(|_| Err("internal error, which the log has".into())).map_err(|reason| entry.fail(reason))
    }

    /// Returns the store of a model: the one that is already open for its fingerprint, if any, or else a new one.
    async fn store(&self, served: &Served) -> Result<Store, String> {
        let fingerprint = &served.codec.fingerprint;
        let known = self.stores().iter().find(|(of, _)| of == fingerprint).map(|(_, store)| store.clone());
        if let Some(store) = known {
            return Ok(store);
        }
        let store = self.0.loader.store(served).await?;
        self.stores().push((fingerprint.clone(), store.clone()));
        Ok(store)
    }

    /// Unloads idle models, the least recently used first, until `bytes` more fit into the budget.
    async fn make_room(&self, entry: &Arc<Entry>, bytes: u64) -> Result<(), ApiError> {
        let (budget, name) = (self.0.options.budget, entry.name());
        if bytes > budget {
            let (needed, left) = (bytes.div_ceil(1 << 20), budget >> 20);
            return Err(entry.fail(format!("it needs {needed} MiB, and --ram-budget leaves {left} MiB for models")));
        }
        let mut looks = 0;
        loop {
            let entries = self.entries();
            let uses: Vec<_> = entries.iter().map(|entry| (entry, entry.use_of_memory())).collect();
            let taken: u64 = uses.iter().map(|(_, (bytes, _))| *bytes).sum();
            if taken.saturating_add(self.replaced_bytes()).saturating_add(bytes) <= budget {
                return Ok(());
            }
            let idle = uses.iter().filter_map(|(entry, (_, idle))| Some((idle.as_ref()?, *entry)));
            let Some((_, oldest)) = idle.min_by_key(|(used, _)| **used) else {
                looks += 1;
                if looks < LOOKS {
                    tokio::time::sleep(LOOK_AGAIN).await;
                    continue;
                }
                let message = format!("there is no memory for the model `{name}` now: every loaded model has requests");
                return Err(unavailable("models_busy", message).retried_after(RETRY_BUSY));
            };
            // If a request for it has come in between, the next round finds another model.
            if let Some(instance) = oldest.put_to_sleep() {
                info!("unloading the model {}: {name} needs its memory", oldest.name());
                instance.served.prefixes.clear();
                instance.served.engine.drain();
                instance.ended().await;
            }
        }
    }

    /// Returns the bytes of replaced instances that are still in use.
    fn replaced_bytes(&self) -> u64 {
        let mut replaced = self.replaced();
        replaced.retain(|(instance, _)| instance.strong_count() > 0);
        replaced.iter().map(|(_, bytes)| *bytes).sum()
    }

    /// Marks the model as failed if its engine stops by itself. The other models go on; this one is loaded again after
    /// a pause.
    fn watch(&self, entry: &Arc<Entry>, instance: &Arc<Instance>) {
        let Some(mut ended) = instance.ended.clone() else { return };
        let (models, watched) = (Arc::downgrade(&self.0), (Arc::downgrade(entry), Arc::downgrade(instance)));
        tokio::spawn(async move {
            let _ = ended.wait_for(|ended| *ended).await;
            let Some((entry, instance)) = watched.0.upgrade().zip(watched.1.upgrade()) else { return };
            let is_closing = models.upgrade().is_none_or(|models| models.closing.load(Ordering::SeqCst));
            if !is_closing && !instance.asleep.swap(true, Ordering::SeqCst) {
                entry.fail("its engine stopped unexpectedly".into());
            }
        });
    }
}
