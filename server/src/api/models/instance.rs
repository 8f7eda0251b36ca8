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
    /// RWKV's vocabulary file, for a model that is one file and has none in its folder.
    pub vocabulary: Option<PathBuf>,
    /// Changes with the files of the folder.
    pub stamp: u64,
}

/// Loads models.
pub trait Loader: Send + Sync + 'static {
    /// The bytes that the model's weights and slots are going to take of the budget. It may block.
    ///
    /// # Errors
    /// The folder has no model.
    fn size(&self, model: &ModelSource) -> Result<u64, String>;

    /// Loads the model and starts its engine. It may block.
    ///
    /// # Errors
    /// The reason.
    fn load(&self, model: &ModelSource) -> Result<(Served, EngineThread), String>;

    /// Opens the store of the model's sessions.
    ///
    /// # Errors
    /// The reason.
    fn store<'a>(&'a self, served: &'a Served) -> BoxFuture<'a, Result<Store, String>>;
}

/// A model with its engine and its sessions.
pub(in crate::api) struct Instance {
    pub(in crate::api) served: Arc<Served>,
    pub(in crate::api) store: Option<Store>,
    /// Whether its engine has been ended; what does not need one still works.
    pub(super) asleep: AtomicBool,
    /// Whether its engine's thread has ended; none for the only model of a server.
    pub(super) ended: Option<watch::Receiver<bool>>,
}

impl Instance {
    /// The only model of a server, whose engine is watched elsewhere.
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

    /// Whether its engine has been ended.
    pub(in crate::api) fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    /// Waits until the engine's thread has ended, and with it the weights and slots are gone.
    pub(super) async fn ended(&self) {
        if let Some(mut ended) = self.ended.clone() {
            // Without its sender, it has ended as well.
            let _ = ended.wait_for(|ended| *ended).await;
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Nobody can submit to it any more, so its thread must not wait.
        if self.ended.is_some() {
            self.served.engine.drain();
        }
    }
}
