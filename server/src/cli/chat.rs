//! The flags of `chat`.

use clap::Args;

use super::generate::SamplingArgs;
use super::shared::{LogArgs, ModelArgs};
use super::storage::SessionArgs;

/// Shown below the flags by `chat --help`.
const NOTES: &str = "\
Each line is a message, and `/help` lists the commands. Ctrl-C stops an answer and keeps what was shown; a second one,
Ctrl-D or /exit ends. Lines can come from a pipe as well; the exit code is then 1 if one of them failed.

The flags of `serve` under \"Sessions\" are flags of `chat` too, with the same variables. Give those of the server that
uses the same folder at other times, or --no-keep.";

/// The flags of `chat`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct ChatArgs {
    /// Continue this conversation, which an earlier `chat` or a server has kept
    #[arg(long, value_name = "ID", conflicts_with_all = ["system", "seed", "no_keep"])]
    pub(crate) session: Option<String>,
    /// Instructions before the first message, if the model has a chat template
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Keep nothing on disk: the conversation ends with the program
    #[arg(long)]
    pub(crate) no_keep: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) sessions: SessionArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}
