//! How a checkpoint is served.

use std::path::PathBuf;

use tidegate_model::StateType;

use super::backend::BackendChoice;
use super::choice::DeviceChoice;
use super::load::Files;
use crate::engine::EngineOptions;
use crate::text::HelperCommand;

/// How a checkpoint is served.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The model name of requests; [`model_name`] by default.
    pub name: Option<String>,
    /// Whether it answers to every other name as well.
    pub any_name: bool,
    /// RWKV's vocabulary file, for a model that is one file and has none in its folder.
    pub vocabulary: Option<PathBuf>,
    /// What computes.
    pub backend: BackendChoice,
    /// The device that computes.
    pub device: DeviceChoice,
    /// Conversations that run at once; 0 means 64 on the CPU, and as many as fit into a CUDA device's memory.
    pub slots: usize,
    /// The number format of their states.
    pub state: StateType,
    /// Longest prompt, in tokens; the model bounds a source as well.
    pub max_prompt_tokens: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    /// Bytes of the prefix cache; 0 disables it.
    pub prefix_bytes: usize,
    /// Most prefixes of one owner.
    pub prefixes_per_owner: usize,
    /// The secret that snapshots are signed and encrypted with, if any.
    pub secret: Option<Vec<u8>>,
    /// The process that tries grammars before the server compiles them; without one, they are compiled at once.
    pub grammar_helper: Option<HelperCommand>,
    /// Whether tokens that have followed others earlier in a text are proposed as drafts.
    pub lookup: bool,
    /// A smaller model with the same tokens, which proposes drafts.
    pub draft_model: Option<Files>,
    /// The engine's settings.
    pub engine: EngineOptions,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            name: None,
            any_name: false,
            vocabulary: None,
            backend: BackendChoice::default(),
            device: DeviceChoice::default(),
            slots: 0,
            state: StateType::F32,
            max_prompt_tokens: 1_000_000,
            max_tokens: 1_000_000,
            prefix_bytes: 256 << 20,
            prefixes_per_owner: 128,
            secret: None,
            grammar_helper: None,
            lookup: true,
            draft_model: None,
            engine: EngineOptions::default(),
        }
    }
}
