//! A model that is being served: everything that requests need of it, except its sessions.

use std::sync::Arc;

use axum::http::StatusCode;
use tidegate_model::SamplingParams;

use super::error::ApiError;
use crate::engine::{EngineHandle, Limits};
use crate::ram::ModelMemory;
use crate::session::{Codec, PrefixIndex};
use crate::text::{ChatTemplate, Grammars, Tokenizer};

/// A model that is being served.
pub struct Served {
    /// The name that requests may give as `model`.
    pub name: String,
    /// Whether it also answers to every other name.
    pub any_name: bool,
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
    /// How much of the process's memory the model takes.
    pub memory: ModelMemory,
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

    /// Refuses a request that names another model.
    pub(super) fn check_name(&self, name: &str, param: Option<&str>) -> Result<(), ApiError> {
        if name == self.name || self.any_name {
            return Ok(());
        }
        Err(unknown_model(name, &[self.name.as_str()], param))
    }
}

/// Most model names that an error message lists.
const LISTED: usize = 20;

/// Creates the error for a model that the server does not have. The message lists `names`, the models that it has.
pub(super) fn unknown_model(name: &str, names: &[&str], param: Option<&str>) -> ApiError {
    let listed: Vec<String> = names.iter().take(LISTED).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > LISTED { ", …" } else { "" };
    let message = format!("the model `{name}` does not exist; this server has {}{more}", listed.join(", "));
    ApiError::request(StatusCode::NOT_FOUND, param, Some("model_not_found"), message)
}
