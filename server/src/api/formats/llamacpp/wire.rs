//! The body of a request at `/completion`, what of it is refused, and what holds for it in the end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tidegate_model::SamplingParams;
use utoipa::ToSchema;

use super::answer::Completion;
use super::biases::Biases;
use super::prompts::Prompts;
use crate::api::error::ApiError;
use crate::api::formats::foreign::{Begun, Foreign};
use crate::api::formats::openai::wire::{GenerationRequest, Logprobs, Prompt, Seed, Stop, parse};
use crate::api::formats::unsupported::is_same;
use crate::api::openapi::fragments;
use crate::api::request::choices::longest;
use crate::api::request::grammar::Constrained;
use crate::api::request::validate::sampling;
use crate::api::run::encoder::Dialect;
use crate::api::state::Served;
use crate::text::GrammarSpec;

/// The samplers in the order in which they are applied.
const SAMPLERS: [&str; 6] = ["penalties", "temperature", "top_k", "typ_p", "top_p", "min_p"];

/// Most tokens whose probabilities are listed with each.
const MOST_PROBS: u64 = 20;

/// A text to complete. `null` is the same as absent.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = LlamaRequest)]
pub(super) struct CompletionRequest {
    model: Option<String>,
    #[schema(required, schema_with = fragments::llama_prompt)]
    prompt: Option<Prompts>,
    #[serde(alias = "max_tokens")]
    #[schema(schema_with = fragments::llama_tokens)]
    n_predict: Option<i64>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f64>,
    /// 0 and below mean all.
    top_k: Option<i64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    #[serde(alias = "typ_p")]
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repeat_penalty: Option<f64>,
    /// With penalties: -1 only, because they apply to the whole text.
    repeat_last_n: Option<i64>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    #[schema(schema_with = fragments::seed)]
    seed: Option<Seed>,
    #[schema(schema_with = fragments::stop)]
    stop: Option<Stop>,
    stream: Option<bool>,
    #[schema(schema_with = fragments::llama_biases)]
    logit_bias: Option<Biases>,
    ignore_eos: Option<bool>,
    #[schema(minimum = 0, maximum = 20)]
    n_probs: Option<u64>,
    return_tokens: Option<bool>,
    /// The server's order of samplers, or absent.
    #[schema(schema_with = fragments::anything)]
    samplers: Option<Value>,
    /// Only -1: a request cannot choose its slot.
    #[schema(minimum = -1, maximum = -1)]
    id_slot: Option<i64>,
    /// A schema that the text must match.
    #[schema(value_type = Option<Object>)]
    json_schema: Option<Value>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// Fields that would change the answer, each with the values that ask for nothing.
fn neutral() -> [(&'static str, Vec<Value>); 19] {
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

impl CompletionRequest {
    fn check(&self) -> Result<(), ApiError> {
        if self.rest.get("grammar").is_some_and(|grammar| !grammar.is_null() && grammar != "") {
            let message = "grammar must be absent, null or empty: GBNF is not supported; /v1/completions takes \
                           grammars in Lark's form, regular expressions and JSON schemas";
            return Err(invalid("grammar", message));
        }
        for (name, neutral) in neutral() {
            let Some(value) = self.rest.get(name).filter(|value| !value.is_null()) else { continue };
            if !neutral.iter().any(|neutral| is_same(value, neutral)) {
                let allowed: Vec<String> = neutral.iter().chain([&Value::Null]).map(ToString::to_string).collect();
                let message = format!("{name} must be absent or {}: it is not supported", allowed.join(" or "));
                return Err(invalid(name, message));
            }
        }
        if self.samplers.as_ref().is_some_and(|samplers| !samplers.is_null() && *samplers != json!(SAMPLERS)) {
            let message = format!("samplers must be absent or in the order that there is: {}", json!(SAMPLERS));
            return Err(invalid("samplers", message));
        }
        if let Some(slot) = self.id_slot.filter(|slot| *slot != -1) {
            return Err(invalid("id_slot", format!("id_slot must be absent or -1, any slot will do, found {slot}")));
        }
        let penalises = |penalty: Option<f64>, neutral: f64| penalty.is_some_and(|penalty| penalty != neutral);
        let penalises = penalises(self.repeat_penalty, 1.0)
            || penalises(self.presence_penalty, 0.0)
            || penalises(self.frequency_penalty, 0.0);
        match self.repeat_last_n {
            Some(last) if penalises && last != -1 => {
                let message = format!("repeat_last_n must be absent or -1 with penalties, found {last}: they see all");
                Err(invalid("repeat_last_n", message))
            }
            _ => Ok(()),
        }
    }

    /// Tokens to generate at most; by itself as many as one request may take.
    fn max_tokens(&self, prompts: &[Vec<u32>], served: &Served) -> Result<u64, ApiError> {
        let most = served.limits.max_tokens as u64;
        match self.n_predict {
            None | Some(-1) => Ok(longest(prompts, self.n_probs.unwrap_or(0), served)),
            Some(found) => {
                let tokens = u64::try_from(found).ok().filter(|tokens| (1..=most).contains(tokens));
                let message = || format!("n_predict must be -1 or from 1 to {most}, found {found}");
                tokens.ok_or_else(|| invalid("n_predict", message()))
            }
        }
    }

    /// The same as a request for completions, and what holds for it.
    fn into_generation(mut self, served: &Served) -> Result<(GenerationRequest, Settings), ApiError> {
        self.check()?;
        let prompts = self.prompt.take().ok_or_else(|| invalid("prompt", "prompt must be given"))?.ids(served)?;
        let biases = self.logit_bias.take().map(|biases| biases.by_id(served)).transpose()?.unwrap_or_default();
        if let Some(probs) = self.n_probs.filter(|probs| *probs > MOST_PROBS) {
            return Err(invalid("n_probs", format!("n_probs must be at most {MOST_PROBS}, found {probs}")));
        }
        let max_tokens = self.max_tokens(&prompts, served)?;
        let request = GenerationRequest {
            model: self.model,
            prompt: Some(Prompt::IdLists(prompts)),
            max_tokens: Some(max_tokens),
            stop: self.stop,
            stream: self.stream,
            temperature: self.temperature,
            top_p: self.top_p,
            // Whatever is not above 0 is all.
            top_k: self.top_k.map(|top_k| top_k.max(0)),
            min_p: self.min_p,
            typical_p: self.typical_p,
            repetition_penalty: self.repeat_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: Some(biases.into_iter().map(|(id, bias)| (id.to_string(), bias)).collect()),
            seed: self.seed.filter(|seed| !is_random(*seed)),
            ignore_eos: self.ignore_eos,
            constrained: self.json_schema.filter(|schema| !schema.is_null()).map(schema),
            logprobs: self.n_probs.filter(|probs| *probs > 0).map(Logprobs::Top),
            ..GenerationRequest::default()
        };
        let sampling = sampling(&request, &served.sampling)?;
        let mut settings = Settings::new(&sampling, max_tokens);
        settings.stop = match &request.stop {
            None => Vec::new(),
            Some(Stop::One(one)) => vec![one.clone()],
            Some(Stop::Many(many)) => many.clone(),
        };
        settings.ignore_eos = self.ignore_eos.unwrap_or(false);
        settings.stream = self.stream.unwrap_or(false);
        settings.n_probs = self.n_probs.unwrap_or(0);
        settings.return_tokens = self.return_tokens.unwrap_or(false);
        // The seed that was drawn for the settings is the one that is used.
        Ok((GenerationRequest { seed: Some(Seed::Unsigned(sampling.seed)), ..request }, settings))
    }
}

fn schema(schema: Value) -> Constrained {
    Constrained::new(GrammarSpec::JsonSchema(schema), "json_schema", "json_schema")
}

/// Both mean "any": -1, and what it is in the 32 bits that llama.cpp has for it.
fn is_random(seed: Seed) -> bool {
    matches!(seed, Seed::Signed(-1) | Seed::Unsigned(0xFFFF_FFFF))
}

/// The settings of a request, with all defaults.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = LlamaSettings)]
pub(super) struct Settings {
    seed: u64,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    typical_p: f32,
    repeat_penalty: f32,
    repeat_last_n: i64,
    presence_penalty: f32,
    frequency_penalty: f32,
    mirostat: u8,
    stop: Vec<String>,
    n_predict: u64,
    max_tokens: u64,
    n_keep: u64,
    ignore_eos: bool,
    stream: bool,
    pub(super) n_probs: u64,
    #[schema(value_type = Vec<Value>)]
    logit_bias: Vec<(u32, f32)>,
    grammar: &'static str,
    samplers: [&'static str; 6],
    #[serde(skip)]
    pub(super) return_tokens: bool,
}

impl Settings {
    fn new(sampling: &SamplingParams, max_tokens: u64) -> Self {
        Self {
            seed: sampling.seed,
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
            return_tokens: false,
        }
    }

    /// What holds where a request says nothing.
    pub(super) fn default_of(served: &Served) -> Value {
        let mut params = json!(Self::new(&served.sampling, served.limits.max_tokens as u64));
        // Drawn for each request.
        params["seed"] = json!(-1);
        params
    }
}

impl Foreign for Settings {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("max_tokens", "n_predict"), ("repetition_penalty", "repeat_penalty")];

    fn read(body: &[u8], served: &Served) -> Result<(GenerationRequest, Self), ApiError> {
        let wire: CompletionRequest = parse(body)?;
        let (wire, settings) = wire.into_generation(served)?;
        Ok((wire, settings))
    }

    fn dialect(self, begun: &Begun<'_>) -> Box<dyn Dialect> {
        Box::new(Completion::new(self, begun))
    }
}
