//! The flags that several commands share: the model and the log.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidegate_server::checkpoint::{BackendChoice, DeviceChoice};

use super::bench::StateArg;
use super::parse::within;
use crate::hub::VOCABULARY;

const MODEL: &str = "Folder, GGUF file, RWKV-7 as .pth or .safetensors, or, of a hub, ORG/NAME[@REVISION][:FILE]; repeated for several [default: the shipped model]";

/// Returns the help of `--rwkv-vocabulary`.
pub(super) fn vocabulary_help() -> String {
    format!("RWKV's vocabulary for a .pth or .safetensors file without one beside it [default: of {VOCABULARY}]")
}

/// The model and where it runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    // Not a doc comment, because its brackets would be links.
    #[arg(help = MODEL, long, env = "TIDEGATE_MODEL", value_name = "MODEL[=NAME]")]
    pub(crate) model: Vec<PathBuf>,
    #[arg(help = vocabulary_help(), long, env = "TIDEGATE_RWKV_VOCABULARY", value_name = "FILE|ORG/NAME[@REVISION][:FILE]")]
    pub(crate) rwkv_vocabulary: Option<PathBuf>,
    /// native: our own kernels; candle: the portable backend; auto: native where it has the model's family
    #[arg(long, env = "TIDEGATE_BACKEND", value_name = "BACKEND", default_value_t)]
    pub(crate) backend: BackendChoice,
    /// cpu, cuda, cuda:N, metal (candle alone), or auto: the first usable GPU, else the CPU
    #[arg(long, env = "TIDEGATE_DEVICE", value_name = "DEVICE", default_value_t)]
    pub(crate) device: DeviceChoice,
    /// Compute threads [default: one per core]
    #[arg(long, env = "TIDEGATE_THREADS", value_name = "COUNT", value_parser = within(1, 1024))]
    pub(crate) threads: Option<usize>,
    /// Type of states in memory; bf16 is faster in large batches
    #[arg(long, env = "TIDEGATE_STATE", value_enum, default_value_t = StateArg::F32)]
    pub(crate) state: StateArg,
}

/// The log, which goes to standard error.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Logging")]
pub(crate) struct LogArgs {
    /// Log filter, as LEVEL or TARGET=LEVEL,… [default: info; generate, chat, eval: warn]
    #[arg(long, env = "TIDEGATE_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,
    /// Lines of text, or JSON objects
    #[arg(long, env = "TIDEGATE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Human)]
    pub(crate) log_format: LogFormat,
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Human,
    Json,
}
