//! The settings of a completion as responses and `/props` list them.

use serde::Serialize;
use tidegate_model::SamplingParams;
use utoipa::ToSchema;

use super::slot::SlotId;
use crate::api::formats::openai::wire::Seed;
use crate::api::state::Served;

/// The samplers in the order in which they are applied.
const SAMPLERS: [&str; 6] = ["penalties", "temperature", "top_k", "typ_p", "top_p", "min_p"];

/// What the encoder needs to know about a request.
pub(in crate::api) struct Options {
    pub(super) slot: Option<SlotId>,
    pub(super) stop: Vec<String>,
    pub(super) ignore_eos: bool,
    /// How many of the likeliest tokens to list with each token.
    pub(super) n_probs: usize,
    pub(super) return_tokens: bool,
}

/// The settings that a request ran with, or the server's defaults.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaSettings)]
pub(in crate::api) struct Settings {
    /// -1 in the defaults, which means a random seed for each request.
    seed: Seed,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    typical_p: f32,
    repeat_penalty: f32,
    /// Always -1: penalties apply to all tokens.
    repeat_last_n: i64,
    presence_penalty: f32,
    frequency_penalty: f32,
    mirostat: u8,
    pub(super) stop: Vec<String>,
    /// Maximum number of tokens to generate.
    n_predict: usize,
    max_tokens: usize,
    n_keep: u64,
    pub(super) ignore_eos: bool,
    pub(super) stream: bool,
    pub(super) n_probs: usize,
    /// Pairs of a token id and its bias.
    logit_bias: Vec<(u32, f32)>,
    grammar: &'static str,
    samplers: [&'static str; 6],
}

impl Settings {
    pub(super) fn new(sampling: &SamplingParams, max_tokens: usize) -> Self {
        Self {
            seed: Seed::Unsigned(sampling.seed),
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            typical_p: sampling.typical_p,
            repeat_penalty: sampling.repetition_penalty,
            repeat_last_n: -1,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            mirostat: 0,
            stop: Vec::new(),
            n_predict: max_tokens,
            max_tokens,
            n_keep: 0,
            ignore_eos: false,
            stream: false,
            n_probs: 0,
            logit_bias: sampling.logit_bias.clone(),
            grammar: "",
            samplers: SAMPLERS,
        }
    }

    /// Returns the server's defaults.
    pub(super) fn defaults(served: &Served) -> Self {
        Self { seed: Seed::Signed(-1), ..Self::new(&served.sampling, served.limits.max_tokens) }
    }
}
