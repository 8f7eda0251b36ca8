//! The body of a request at `/completion`, and its conversion.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::biases::Biases;
use super::encoder::LlamaEncoder;
use super::prompts::Prompts;
use super::settings::{Options, SAMPLERS};
use crate::api::error::ApiError;
use crate::api::formats::format::{Converted, Format};
use crate::api::formats::openai::wire::{Seed, Stop};
use crate::api::formats::unsupported::{self, Neutral};
use crate::api::request::continuation::SessionParameters;
use crate::api::request::grammar::GrammarRequest;
use crate::api::request::sampling::SamplingOverrides;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest, ValidRequest};
use crate::api::run::encoder::EventEncoder;
use crate::api::state::Served;
use crate::text::GrammarSpec;

const NAMES: ParameterNames =
    ParameterNames { prompt: "prompt", max_tokens: "n_predict", stop: "stop", repetition_penalty: "repeat_penalty" };

/// Most tokens whose probabilities are listed with each.
const MAX_PROBS: u64 = 20;

/// A request for completions as llama.cpp defines it. A field that is null counts as absent.
#[derive(Debug, Deserialize)]
pub(in crate::api) struct LlamaRequest {
    model: Option<String>,
    prompt: Option<Prompts>,
    #[serde(alias = "max_tokens")]
    n_predict: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    #[serde(alias = "typ_p")]
    typical_p: Option<f64>,
    repeat_penalty: Option<f64>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    seed: Option<Seed>,
    stop: Option<Stop>,
    stream: Option<bool>,
    logit_bias: Option<Biases>,
    ignore_eos: Option<bool>,
    n_probs: Option<u64>,
    return_tokens: Option<bool>,
    samplers: Option<Value>,
    id_slot: Option<i64>,
    json_schema: Option<Value>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

fn neutral() -> [Neutral; 19] {
    [
        ("dry_multiplier", vec![json!(0)]),
        ("dynatemp_range", vec![json!(0)]),
        ("grammar_lazy", vec![json!(false)]),
        ("grammar_triggers", vec![json!([])]),
        ("lora", vec![json!([])]),
        ("min_keep", vec![json!(0)]),
        ("mirostat", vec![json!(0)]),
        ("n", vec![json!(1)]),
        ("n_cmpl", vec![json!(1)]),
        ("n_indent", vec![json!(0)]),
        ("post_sampling_probs", vec![json!(false)]),
        ("preserved_tokens", vec![json!([])]),
        ("response_fields", vec![json!([])]),
        ("response_format", vec![json!({"type": "text"})]),
        ("return_progress", vec![json!(false)]),
        ("t_max_predict_ms", vec![json!(0), json!(-1)]),
        ("timings_per_token", vec![json!(false)]),
        ("top_n_sigma", vec![json!(-1), json!(0)]),
        ("xtc_probability", vec![json!(0)]),
    ]
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl LlamaRequest {
    fn check(&self) -> Result<(), ApiError> {
        if self.rest.get("grammar").is_some_and(|grammar| !grammar.is_null() && grammar != "") {
            let message = "grammar must be absent, null or empty: GBNF is not supported; /v1/completions takes \
                           grammars in Lark's form, regular expressions and JSON schemas";
            return Err(invalid("grammar", message));
        }
        unsupported::refuse(&self.rest, neutral())?;
        if self.samplers.as_ref().is_some_and(|samplers| !samplers.is_null() && *samplers != json!(SAMPLERS)) {
            let message = format!("samplers must be absent or {}: no other order is supported", json!(SAMPLERS));
            return Err(invalid("samplers", message));
        }
        if let Some(slot) = self.id_slot.filter(|slot| *slot != -1) {
            return Err(invalid(
                "id_slot",
                format!("id_slot must be absent or -1, found {slot}: a request is not bound to a slot"),
            ));
        }
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
            _ => Ok(()),
        }
    }

    /// By default a text may be as long as the server allows.
    fn max_tokens(&self, served: &Served) -> Result<MaxTokens, ApiError> {
        let most = served.limits.max_tokens as u64;
        let Some(found) = self.n_predict.filter(|tokens| *tokens != -1) else { return Ok(MaxTokens::Longest) };
        let tokens = u64::try_from(found).ok().filter(|tokens| (1..=most).contains(tokens));
        let message = || format!("n_predict must be -1 or from 1 to {most}, found {found}");
        tokens.map(MaxTokens::Given).ok_or_else(|| invalid("n_predict", message()))
    }
}

impl Format for LlamaRequest {
    type Options = Options;

    fn convert(mut self, served: &Served) -> Result<Converted<Options>, ApiError> {
        self.check()?;
        let prompt = self.prompt.take().ok_or_else(|| invalid("prompt", "prompt must be given"))?.convert()?;
        let logit_bias = self.logit_bias.take().map(|biases| biases.by_id(served)).transpose()?.unwrap_or_default();
        let n_probs = self.n_probs.unwrap_or(0);
        if n_probs > MAX_PROBS {
            return Err(invalid("n_probs", format!("n_probs must be at most {MAX_PROBS}, found {n_probs}")));
        }
        let max_tokens = self.max_tokens(served)?;
        let options = Options {
            stop: Stop::all(self.stop),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            n_probs: n_probs as usize,
            return_tokens: self.return_tokens.unwrap_or(false),
        };
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
            logprobs: Some(options.n_probs).filter(|probs| *probs > 0),
            grammar: self.json_schema.filter(|schema| !schema.is_null()).map(schema),
            ..TextRequest::new(NAMES, prompt, max_tokens)
        };
        let (session, stream) = (SessionParameters::default(), self.stream.unwrap_or(false));
        Ok(Converted { request, session, stream, options })
    }

    fn encoder(options: Options, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder> {
        Box::new(LlamaEncoder::new(options, request, !collect))
    }
}

fn schema(schema: Value) -> GrammarRequest {
    GrammarRequest::new(GrammarSpec::JsonSchema(schema), "json_schema", "json_schema")
}

/// -1 means a random seed, also as the 32 bits that llama.cpp has for a seed.
fn is_random(seed: Seed) -> bool {
    matches!(seed, Seed::Signed(-1) | Seed::Unsigned(0xFFFF_FFFF))
}
