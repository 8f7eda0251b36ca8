//! A model that is loaded, and what loads it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::task::spawn_blocking;

use crate::api::served::Served;
use crate::engine::EngineThread;
use crate::session::Store;

/// A model that can be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSource {
    /// The name that requests give as `model`.
    pub name: String,
    /// The folder of its checkpoint.
    pub folder: PathBuf,
    /// RWKV's vocabulary file, for a model that is a single file with no vocabulary in its folder.
    pub vocabulary: Option<PathBuf>,
    /// A value that changes with the files of the folder.
    pub stamp: u64,
}

/// Loads models.
pub trait Loader: Send + Sync + 'static {
    /// Returns the bytes of the budget that the model's weights and slots will take. May block.
    ///
    /// # Errors
    /// The folder has no model.
    fn size(&self, model: &ModelSource) -> Result<u64, String>;

    /// Loads the model and starts its engine. May block.
    ///
    /// # Errors
    /// Returns the reason for the failure.
    fn load(&self, model: &ModelSource) -> Result<(Served, EngineThread), String>;

    /// Opens the store of the model's sessions.
    ///
    /// # Errors
    /// Returns the reason for the failure.
    fn store<'a>(&'a self, served: &'a Served) -> BoxFuture<'a, Result<Store, String>>;
}

/// A model with its engine and its sessions.
pub(in crate::api) struct Instance {
    pub(in crate::api) served: Arc<Served>,
    pub(in crate::api) store: Option<Store>,
    /// Whether the engine has been stopped; what needs no engine still works.
    pub(super) asleep: AtomicBool,
    /// Whether the engine's thread has ended; `None` for the only model of a server.
    pub(super) ended: Option<watch::Receiver<bool>>,
}

impl Instance {
    /// Creates the instance of a server's only model, whose engine is watched elsewhere.
    pub(in crate::api) fn only(served: Served, store: Option<Store>) -> Self {
        Self { served: Arc::new(served), store, asleep: AtomicBool::new(false), ended: None }
    }

    pub(super) fn new(served: Served, store: Store, thread: EngineThread) -> Self {
        let (sender, ended) = watch::channel(false);
        spawn_blocking(move || {
            thread.join();
            sender.send_replace(true);
        });
        Self { served: Arc::new(served), store: Some(store), asleep: AtomicBool::new(false), ended: Some(ended) }
    }

    /// Whether the engine has been stopped.
    pub(in crate::api) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Waits until the engine's thread has ended. The weights and slots are then freed.
    pub(super) async fn ended(&self) {
        if let Some(mut ended) = self.ended.clone() {
            // If the sender is gone, the thread has ended as well.
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Nothing can submit to the engine any more, so its thread must not wait for work.
        if self.ended.is_some() {
            self.served.engine.drain();
        }
    }
}
