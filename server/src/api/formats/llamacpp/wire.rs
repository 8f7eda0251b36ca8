//! The body of a request at `/completion`, and its conversion.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::biases::Biases;
use super::encoder::LlamaEncoder;
use super::prompts::Prompts;
use super::settings::Options;
use super::slot::{self, SlotId};
use crate::api::error::ApiError;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::openai::wire::{Seed, Stop};
use crate::api::formats::unsupported::{self, Ignored};
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::continuation::{Continuation, SessionParameters};
use crate::api::request::grammar::{GrammarParameters, GrammarRequest};
use crate::api::request::prompt::Prompt;
use crate::api::request::sampling::SamplingOverrides;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest, ValidRequest};
use crate::api::run::encoder::EventEncoder;
use crate::api::state::{AppState, Served};
use crate::session::Owner;
use crate::text::GrammarSpec;

const NAMES: ParameterNames =
    ParameterNames { repetition_penalty: "repeat_penalty", ..ParameterNames::openai("prompt", "n_predict") };

/// The most alternatives that can be listed with each token.
const MAX_PROBS: u64 = 20;

/// A request for completions, as llama.cpp defines it. A field that is null counts as absent.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct LlamaRequest {
    /// The model's name, as in `/v1/models`. Default: the one that is served.
    model: Option<String>,
    #[schema(required, nullable = false)]
    prompt: Option<Prompts>,
    /// Maximum number of tokens to generate; -1, the default, for the server's limit. 0 is allowed only with `id_slot`,
    /// and only reads the prompt.
    #[serde(alias = "max_tokens")]
    #[schema(value_type = Option<LengthField>)]
    n_predict: Option<i64>,
    /// Divides the logits; 0 always takes the likeliest token. Default: the model's.
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    /// Draw from this many of the likeliest tokens; 0 and below mean all. Default: the model's.
    top_k: Option<i64>,
    /// Draw from the likeliest tokens that together have this probability. Default: the model's.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    /// Draw from tokens with at least this share of the likeliest one's probability. Default: the model's.
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    /// Draw from the most typical tokens that together have this probability. Default: the model's.
    #[serde(alias = "typ_p")]
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    /// Values above 1 make tokens that were seen less likely. Default: the model's.
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repeat_penalty: Option<f64>,
    /// With penalties, this must be absent or -1, because they apply to all tokens.
    repeat_last_n: Option<i64>,
    /// Subtracted from the logit of each token that was generated. Default: the model's.
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    /// Subtracted from a token's logit for each time that it was generated. Default: the model's.
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    /// The same seed and prompt give the same text; -1, the default, is random.
    seed: Option<Seed>,
    stop: Option<Stop>,
    /// Whether the answer comes as server-sent events. Default: false.
    stream: Option<bool>,
    logit_bias: Option<Biases>,
    /// Whether to continue past the end of the text. Default: false.
    ignore_eos: Option<bool>,
    /// How many of the likeliest tokens to list with each token. Default: 0.
    #[schema(maximum = 20)]
    n_probs: Option<u64>,
    /// Whether a text that is not streamed comes with its token ids. Default: false.
    return_tokens: Option<bool>,
    /// The slot, a session of the caller, whose state the text continues if the prompt begins with the slot's text. The
    /// slot then holds the whole text. -1, the default, for no slot.
    #[schema(minimum = -1, maximum = 65_535)]
    id_slot: Option<i64>,
    /// A JSON schema that the text must follow.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// The field `n_predict`.
struct LengthField;

json_schemas! {
    LengthField: "LlamaTokens" = {"oneOf": [{"const": -1}, {"type": "integer", "minimum": 0, "maximum": "max_tokens"}]};
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl LlamaRequest {
    fn check(&self) -> Result<Ignored, ApiError> {
        if self.rest.get("grammar").is_some_and(|grammar| !grammar.is_null() && grammar != "") {
            let message = "grammar must be absent, null or empty: GBNF is not supported; /v1/completions takes \
                           grammars in Lark's form, regular expressions and JSON schemas";
            return Err(invalid("grammar", message));
        }
        let ignored = unsupported::check::<Self>(&self.rest)?;
        let penalises = |penalty: Option<f64>, neutral: f64| penalty.is_some_and(|penalty| penalty != neutral);
        let penalises = penalises(self.repeat_penalty, 1.0)
            || penalises(self.presence_penalty, 0.0)
            || penalises(self.frequency_penalty, 0.0);
        match self.repeat_last_n {
            Some(last) if penalises && last != -1 => {
                let message = format!(
                    "repeat_last_n must be absent or -1 with penalties, found {last}: they apply to all tokens"
                );
                Err(invalid("repeat_last_n", message))
            }
            _ => Ok(ignored),
        }
    }

    fn has_slot(&self) -> bool {
        self.id_slot.is_some_and(|slot| slot != -1)
    }

    /// Returns the slot of the request, if it names one.
    fn slot(&self) -> Result<Option<SlotId>, ApiError> {
        match self.id_slot {
            None | Some(-1) => Ok(None),
            Some(number) => match u64::try_from(number) {
                Ok(number) => SlotId::new(number).map(Some),
                Err(_) => Err(invalid("id_slot", format!("id_slot must be -1 or at least 0, found {number}"))),
            },
        }
    }

    /// Returns the maximum number of tokens. By default, a text may be as long as the server allows.
    fn max_tokens(&self, served: &Served) -> Result<MaxTokens, ApiError> {
        let (least, most) = (u64::from(!self.has_slot()), served.limits.max_tokens as u64);
        let Some(found) = self.n_predict.filter(|tokens| *tokens != -1) else { return Ok(MaxTokens::Longest) };
        let tokens = u64::try_from(found).ok().filter(|tokens| (least..=most).contains(tokens));
        let message = || format!("n_predict must be -1 or from {least} to {most}, found {found}");
        tokens.map(MaxTokens::Given).ok_or_else(|| invalid("n_predict", message()))
    }
}

impl Format for LlamaRequest {
    type Options = Options;

    fn convert(mut self, served: &Served) -> Result<Converted<Options>, ApiError> {
        let ignored = self.check()?;
        let prompt = self.prompt.take().ok_or_else(|| invalid("prompt", "prompt must be given"))?.convert()?;
        let logit_bias = self.logit_bias.take().map(|biases| biases.by_id(served)).transpose()?.unwrap_or_default();
        let n_probs = self.n_probs.unwrap_or(0);
        if n_probs > MAX_PROBS {
            return Err(invalid("n_probs", format!("n_probs must be at most {MAX_PROBS}, found {n_probs}")));
        }
        let (max_tokens, slot) = (self.max_tokens(served)?, self.slot()?);
        if slot.is_some() && matches!(&prompt, Prompt::Inputs { inputs, .. } if inputs.len() > 1) {
            return Err(invalid("prompt", "prompt must be a single one with id_slot"));
        }
        let options = Options {
            slot,
            stop: Stop::all(self.stop),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n_probs: n_probs as usize,
            return_tokens: self.return_tokens.unwrap_or(false),
        };
        let grammar = self.json_schema.filter(|schema| !schema.is_null()).map(schema);
        let request = TextRequest {
            model: self.model,
            stop: options.stop.clone(),
            ignore_eos: options.ignore_eos,
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_p: self.top_p,
                // Anything below 1 means all tokens.
                top_k: self.top_k.map(|top_k| top_k.max(0)),
                min_p: self.min_p,
                typical_p: self.typical_p,
                repetition_penalty: self.repeat_penalty,
                frequency_penalty: self.frequency_penalty,
                presence_penalty: self.presence_penalty,
                logit_bias: logit_bias.into_iter().collect(),
                seed: self.seed.filter(|seed| !is_random(*seed)).map(Seed::bits),
            },
            may_only_read: slot.is_some(),
            logprobs: Some(options.n_probs).filter(|probs| *probs > 0),
            grammar: GrammarParameters { grammar, ..GrammarParameters::default() },
            ..TextRequest::new(NAMES, prompt, max_tokens)
        };
        let (session, stream) = (SessionParameters::default(), self.stream.unwrap_or(false));
        Ok(Converted { request, session, stream, ignored, options })
    }

    async fn continuation(
        options: &mut Options,
        session: SessionParameters,
        state: &AppState,
        served: &Arc<Served>,
        owner: Owner,
        headers: &HeaderMap,
    ) -> Result<Continuation, ApiError> {
        match options.slot {
            Some(slot) => slot::continuation(slot, state, owner, headers).await,
            None => Continuation::find(session, state, served, owner, headers).await,
        }
    }

    fn encoder(options: Options, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder> {
        Box::new(LlamaEncoder::new(options, request, !collect))
    }
}

fn schema(schema: Value) -> GrammarRequest {
    GrammarRequest::new(GrammarSpec::JsonSchema(schema), "json_schema", "json_schema")
}

/// Whether the seed means a random one: -1, also as an unsigned 32-bit integer, which is llama.cpp's type for seeds.
fn is_random(seed: Seed) -> bool {
    matches!(seed, Seed::Signed(-1) | Seed::Unsigned(0xFFFF_FFFF))
}
