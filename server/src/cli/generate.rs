//! The flags of `generate`.

use clap::Args;
use tidegate_model::SamplingParams;
use tidegate_server::text::MAX_STOP_STRINGS;

use super::parse::positive;
use super::shared::{LogArgs, ModelArgs};

/// The flags of `generate`.
#[derive(Clone, Debug, Args)]
pub(crate) struct GenerateArgs {
    /// The text to continue; - reads it from standard input
    pub(crate) prompt: String,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// The flags that control sampling.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling (defaults come from the model's generation_config.json)")]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate
    #[arg(long, short = 'n', value_name = "TOKENS", default_value_t = 256, value_parser = positive)]
    pub(crate) max_tokens: usize,
    /// From 0 (greedy) to 2
    #[arg(long, short, value_name = "NUMBER")]
    pub(crate) temperature: Option<f32>,
    /// Sample from the most likely tokens that together have this probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) top_p: Option<f32>,
    /// Sample from this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "COUNT")]
    pub(crate) top_k: Option<usize>,
    /// Sample from tokens with at least this fraction of the most likely one's probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) min_p: Option<f32>,
    /// Sample from the locally typical tokens that together have this probability
    #[arg(long, value_name = "NUMBER")]
    pub(crate) typical_p: Option<f32>,
    /// Above 1, makes tokens that occurred before less likely
    #[arg(long, value_name = "NUMBER")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from a token's logit each time it was generated
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Subtracted once from the logit of each token that was generated
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// The same seed gives the same text [default: random]
    #[arg(long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
    #[arg(help = format!("Stop at this string; may be given up to {MAX_STOP_STRINGS} times"), long, value_name = "STRING")]
    pub(crate) stop: Vec<String>,
    /// Continue past the end-of-text token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

impl SamplingArgs {
    /// Returns the given parameters, and the `defaults` for the others.
    pub(crate) fn over(&self, defaults: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            typical_p: self.typical_p.unwrap_or(defaults.typical_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            seed: self.seed.unwrap_or(defaults.seed),
            ..defaults.clone()
        }
    }
}
