//! A server with several models, all copies of the shipped checkpoint, and requests to it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::Value;
use tidegate_server::api::{Loader, ModelOptions, ModelSource};
use tidegate_server::checkpoint::{OpenOptions, open, size};
use tidegate_server::engine::EngineThread;
use tidegate_server::session::{Location, Store, StoreOptions};
use tidegate_server::{ApiOptions, AppState, Served};

use super::{checkpoint, send};

/// A memory budget in bytes that is enough for one of the models, but not for two.
pub(crate) const ONE: u64 = 24 << 20;

/// Loads checkpoints, and records which ones.
pub(crate) struct Folders {
    options: OpenOptions,
    pub(crate) loads: Mutex<Vec<String>>,
    pub(crate) attempts: AtomicUsize,
}

impl Loader for Folders {
    fn size(&self, model: &ModelSource) -> Result<u64, String> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        let memory = size(&model.folder, &self.options).map_err(|error| error.to_string())?;
        Ok(memory.weights + memory.slots)
    }

    fn load(&self, model: &ModelSource) -> Result<(Served, EngineThread), String> {
        self.loads.lock().unwrap().push(model.name.clone());
        let options = OpenOptions { name: Some(model.name.clone()), ..self.options.clone() };
        open(&model.folder, &options).map_err(|error| error.to_string())
    }

    fn store<'a>(&'a self, served: &'a Served) -> BoxFuture<'a, Result<Store, String>> {
        let store = Store::open(StoreOptions::new(Location::Memory), served.codec.clone());
        store.map(|store| store.map_err(|error| error.to_string())).boxed()
    }
}

/// A server with several models.
pub(crate) struct Several {
    pub(crate) state: AppState,
    pub(crate) loader: Arc<Folders>,
    folder: tempfile::TempDir,
}

/// A complete answer.
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("no JSON: {}", self.text))
    }

    /// Checks that the request succeeded, and returns its body.
    pub(crate) fn ok(&self) -> Value {
        assert!(self.status.is_success(), "{}: {}", self.status, self.text);
        self.json()
    }

    /// Returns the status and the code of an error.
    pub(crate) fn refusal(&self) -> (u16, String) {
        (self.status.as_u16(), self.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    }
}

/// Copies the shipped checkpoint. Each `revision` has its own fingerprint, so revisions do not share sessions.
pub(crate) fn write(folder: &Path, revision: usize) {
    std::fs::create_dir_all(folder).unwrap();
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let (from, to) = (checkpoint().join(name), folder.join(name));
        if !to.exists() {
            std::os::unix::fs::symlink(from, to).unwrap();
        }
    }
    let config = std::fs::read_to_string(checkpoint().join("config.json")).unwrap();
    std::fs::write(folder.join("config.json"), config + &"\n".repeat(revision)).unwrap();
}

/// Starts a server with models of these names. Models can be loaded together while their memory is within `budget`.
pub(crate) async fn several(names: &[&str], budget: u64, any_name: bool) -> Several {
    let folder = tempfile::tempdir().unwrap();
    for (revision, name) in names.iter().enumerate() {
        write(&folder.path().join(name), revision);
    }
    let options = OpenOptions { slots: 4, any_name, ..OpenOptions::default() };
    let loader = Arc::new(Folders { options, loads: Mutex::default(), attempts: AtomicUsize::new(0) });
    let several = Several { state: AppState::new(ApiOptions::default()), loader, folder };
    let loader: Arc<dyn Loader> = several.loader.clone();
    several.state.serve_models(several.sources(names, 0), ModelOptions { budget, any_name }, loader).await.unwrap();
    several
}

impl Several {
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the sources of these models.
    pub(crate) fn sources(&self, names: &[&str], stamp: u64) -> Vec<ModelSource> {
        let source =
            |name: &&str| ModelSource { name: (*name).to_owned(), folder: self.folder(name), vocabulary: None, stamp };
        names.iter().map(source).collect()
    }

    /// Returns how often a model was loaded.
    pub(crate) fn loads(&self, name: &str) -> usize {
        self.loader.loads.lock().unwrap().iter().filter(|loaded| *loaded == name).count()
    }

    pub(crate) async fn request(&self, method: Method, path: &str, body: &Value, headers: &[(&str, &str)]) -> Reply {
        let mut request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        let (parts, body) = send(&self.state, request.body(body).unwrap()).await.into_parts();
        let text = String::from_utf8_lossy(&to_bytes(body, usize::MAX).await.unwrap()).into_owned();
        Reply { status: parts.status, headers: parts.headers, text }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.request(Method::GET, path, &Value::Null, &[]).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.request(Method::POST, path, &body, &[]).await
    }

    /// Returns the name and the state of each model.
    pub(crate) async fn states(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let models = self.get("/v1/models").await.ok();
        models["data"].as_array().unwrap().iter().map(|model| (text(&model["id"]), text(&model["state"]))).collect()
    }

    /// Returns the state of one model.
    pub(crate) async fn state_of(&self, name: &str) -> String {
        self.get(&format!("/v1/models/{name}")).await.ok()["state"].as_str().unwrap().to_owned()
    }

    /// Starts a stream without reading it.
    pub(crate) async fn stream(&self, body: &Value) -> axum::body::BodyDataStream {
        let request = Request::post("/v1/completions").header("content-type", "application/json");
        let response = send(&self.state, request.body(Body::from(body.to_string())).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().into_data_stream()
    }
}
