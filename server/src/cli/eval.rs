//! The flags of `eval`.

use std::path::PathBuf;

use clap::Args;

use super::hub::ModelsOutput;
use super::parse::positive;
use super::shared::{LogArgs, ModelArgs};

/// Shown below the flags by `eval --help`.
const NOTES: &str = "\
Documents are separated by <|endoftext|>. Each starts from an empty state, after the tokens with which the model's texts begin
or, if there are none, its end-of-text token. The end-of-text token after each document is predicted too. The text is held in
memory.

The logits are those that the server samples from, bit for bit. GPUs, candle and models with a window read one token per step.";

/// The flags of `eval`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct EvalArgs {
    /// UTF-8 text
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Predict at most this many tokens
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub(crate) limit: Option<usize>,
    /// A table, or a JSON object
    #[arg(long, value_enum, default_value_t = ModelsOutput::Table)]
    pub(crate) output: ModelsOutput,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}
