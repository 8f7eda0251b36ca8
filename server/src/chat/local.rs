//! What a conversation needs from a server, within this process: the model, its engine and the stored sessions.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use tidegate_server::checkpoint::{self, Files, OpenOptions};
use tidegate_server::engine::{EngineThread, Request, RequestParameters};
use tidegate_server::session::StoreError;
use tidegate_server::{ApiOptions, AppState, Served, app};

use super::api::Api;
use crate::cli::{ChatArgs, SamplingArgs};
use crate::store;

/// How the model reads what the user types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// As messages, in the model's chat template.
    Messages,
    /// As a text to continue.
    Text,
    /// As a text to translate.
    Source,
}

/// A model that is served to this process only.
pub(super) struct Local {
    pub(super) api: Api,
    /// The name of the model and its device.
    pub(super) name: String,
    pub(super) reading: Reading,
    /// Maximum size in bytes of a conversation's file.
    pub(super) largest_file: usize,
    /// Whether conversations outlive the process.
    pub(super) keeps: bool,
    state: AppState,
    engine: EngineThread,
}

impl Local {
    /// Loads the model in `files` and opens the sessions.
    pub(super) async fn open(args: &ChatArgs, files: Files, name: Option<String>) -> Result<Self> {
        let mut sessions = args.sessions.clone();
        if args.no_keep {
            (sessions.place.index, sessions.place.index_file) = (None, None);
        }
        let data = if args.no_keep { None } else { store::data_folder(&sessions)? };
        let keeps = data.is_some() || sessions.place.has_index();
        let Files { path, vocabulary } = files;
        let options = OpenOptions {
            name,
            vocabulary,
            backend: args.model.backend,
            device: args.model.device,
            // There is only one conversation. Its state is stored, so no prefixes need to be.
            slots: 1,
            prefix_bytes: 0,
            state: args.model.state.into(),
            secret: store::secret(&args.sessions)?,
            ..OpenOptions::default()
        };
        let (served, engine) = checkpoint::open(&path, &options)?;
        check(&args.sampling, &served)?;
        let reading = match (&served.template, &served.limits.sources) {
            (_, Some(_)) => Reading::Source,
            (Some(_), None) => Reading::Messages,
            (None, None) => Reading::Text,
        };
        ensure!(
            args.system.is_none() || reading == Reading::Messages,
            "--system: this model has no chat template, and so no place for instructions"
        );
        let name = format!("{} on {}", served.name, served.device);
        let largest_file = served.codec.max_file_bytes();
        let opened = store::open(&sessions, 0, data.as_deref(), &served).await;
        let state = AppState::new(ApiOptions::default());
        state.set_store(opened.map_err(|error| explain(error, data.as_deref()))?);
        state.serve(served);
        let api = Api::new(app(state.clone()));
        Ok(Self { api, name, reading, largest_file, keeps, state, engine })
    }

    /// Ends running requests and closes the sessions.
    pub(super) async fn close(self) {
        self.state.drain();
        self.state.abort();
        self.state.settle().await;
        self.engine.join();
        self.state.close().await;
    }
}

/// Validates the sampling flags before the first message; the API would refuse wrong ones only then.
fn check(given: &SamplingArgs, served: &Served) -> Result<()> {
    let parameters = RequestParameters {
        prompt: vec![0],
        max_tokens: given.max_tokens,
        stop: given.stop.clone(),
        sampling: given.over(&served.sampling),
        ignore_eos: given.ignore_eos,
        ..RequestParameters::default()
    };
    Request::new(parameters, &served.limits)?;
    Ok(())
}

/// Adds advice to an error about opening the sessions.
fn explain(error: anyhow::Error, data: Option<&Path>) -> anyhow::Error {
    match (error.downcast_ref(), data) {
        (Some(StoreError::InUse { .. }), Some(data)) => anyhow!(
            "a server or another program uses the conversations in {}: end it, or keep this one elsewhere with \
             --data-dir FOLDER or nowhere with --no-keep",
            data.display()
        ),
        _ => error.context("cannot open the session store"),
    }
}
