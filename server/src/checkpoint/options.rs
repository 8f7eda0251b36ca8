//! The options for opening a checkpoint.

use std::path::PathBuf;

use tidegate_model::StateType;

use super::backend::BackendChoice;
use super::choice::DeviceChoice;
use super::load::Files;
use crate::engine::EngineOptions;
use crate::text::HelperCommand;

/// The options for opening a checkpoint.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// The model's name in requests; [`model_name`](super::model_name) by default.
    pub name: Option<String>,
    /// Whether the model also answers requests for any other name.
    pub any_name: bool,
    /// RWKV's vocabulary file, for a model in one file that has none in its folder.
    pub vocabulary: Option<PathBuf>,
    /// The backend that computes.
    pub backend: BackendChoice,
    /// The device that computes.
    pub device: DeviceChoice,
    /// Number of concurrent conversations; 0 means 64 on the CPU, and as many as fit into memory on a CUDA device.
    pub slots: usize,
    /// The number format of the conversations' states.
    pub state: StateType,
    /// Maximum prompt length in tokens; the model also limits the length of a source.
    pub max_prompt_tokens: usize,
    /// Maximum answer length in tokens.
    pub max_tokens: usize,
    /// Maximum bytes of the prefix cache; 0 disables it.
    pub prefix_bytes: usize,
    /// Maximum number of prefixes per owner.
    pub prefixes_per_owner: usize,
    /// The secret with which snapshots are signed and encrypted, if any.
    pub secret: Option<Vec<u8>>,
    /// The helper process that tries grammars before the server compiles them; without one, they are compiled directly.
    pub grammar_helper: Option<HelperCommand>,
    /// Whether to use prompt lookup: tokens that followed the same tokens earlier in a text become draft tokens.
    pub lookup: bool,
    /// A smaller model with the same tokens, which proposes draft tokens.
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
