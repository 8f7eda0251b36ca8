//! The flags of `pull` and `models`, which work on models from a hub.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::shared::{LogArgs, vocabulary_help};
use crate::hub::HubName;

/// Shown below the flags of both commands.
const NOTES: &str = "\
The cache is that of Hugging Face: $HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub. HF_TOKEN, or the file
$HF_HOME/token, is for models that are not public, HF_ENDPOINT names another hub, and HF_HUB_OFFLINE=1 forbids downloads.";

/// The flags of `pull`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct PullArgs {
    /// The model: a branch, tag or commit after @, and a GGUF file, or RWKV-7 as .pth or .safetensors, after :
    #[arg(value_name = "ORG/NAME[@REVISION][:FILE]", value_parser = str::parse::<HubName>)]
    pub(crate) model: HubName,
    #[arg(help = vocabulary_help(), long, env = "TIDEGATE_RWKV_VOCABULARY", value_name = "FILE|ORG/NAME[@REVISION][:FILE]")]
    pub(crate) rwkv_vocabulary: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The flags of `models`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct ModelsArgs {
    /// A table, or one JSON object per line
    #[arg(long, value_enum, default_value_t = ModelsOutput::Table)]
    pub(crate) output: ModelsOutput,
}

/// The format of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelsOutput {
    Table,
    Json,
}
