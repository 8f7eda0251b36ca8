//! The body of a request for a text, and what of it is refused: what would change the answer and is not here.

use serde::Deserialize;
use serde_json::Value;

use super::answer::Answer;
use crate::api::constrained::Constrained;
use crate::api::dialect::Dialect;
use crate::api::error::ApiError;
use crate::api::foreign::{Begun, Foreign};
use crate::api::state::Served;
use crate::api::wire::{GenerationRequest, Logprobs, Prompt, Seed, Stop, parse};
use crate::text::GrammarSpec;

/// Tokens to generate where a request does not say.
const DEFAULT_MAX_TOKENS: usize = 1024;

/// Most texts of which the best is told.
pub(super) const MOST_BEST_OF: u64 = 8;

/// Most tokens that are listed with each.
const MOST_TOP_TOKENS: u64 = 20;

/// A request for a text as text-generation-inference defines it; `null` is the same as absent.
#[derive(Debug, Deserialize)]
struct GenerateRequest {
    inputs: Option<String>,
    parameters: Option<Parameters>,
    stream: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct Parameters {
    best_of: Option<u64>,
    decoder_input_details: Option<bool>,
    details: Option<bool>,
    do_sample: Option<bool>,
    frequency_penalty: Option<f64>,
    max_new_tokens: Option<u64>,
    repetition_penalty: Option<f64>,
    return_full_text: Option<bool>,
    seed: Option<u64>,
    stop: Option<Vec<String>>,
    temperature: Option<f64>,
    top_k: Option<u64>,
    top_n_tokens: Option<u64>,
    top_p: Option<f64>,
    truncate: Option<usize>,
    typical_p: Option<f64>,
    watermark: Option<bool>,
    grammar: Option<Form>,
    adapter_id: Option<String>,
}

/// The form that a text must have.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case")]
enum Form {
    /// A schema, or the text of one.
    Json(Value),
    Regex(String),
    JsonSchema(NamedSchema),
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Value,
}

impl Form {
    fn constrained(self) -> Result<Constrained, ApiError> {
        let spec = match self {
            Self::Regex(regex) => GrammarSpec::Regex(regex),
            Self::Json(Value::String(text)) => {
                let schema = serde_json::from_str(&text);
                GrammarSpec::JsonSchema(schema.map_err(|error| invalid("grammar", format!("grammar.value: {error}")))?)
            }
            Self::Json(schema) | Self::JsonSchema(NamedSchema { schema }) => GrammarSpec::JsonSchema(schema),
        };
        Ok(Constrained::new(spec, "grammar", "grammar.value"))
    }
}

/// Which way a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Whole,
    Stream,
    /// As the body says, and with the prompt in front of the text where it says nothing of that.
    Either,
}

/// What the answer needs to know of a request.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of the format's own")]
#[derive(Debug)]
pub(super) struct Generate {
    /// A list of one text: what is answered where either could have been asked for.
    pub(super) listed: bool,
    /// What the text begins with.
    pub(super) before: String,
    pub(super) details: bool,
    pub(super) prefill: bool,
    pub(super) best_of: usize,
    pub(super) top: usize,
    /// Whether tokens are drawn.
    pub(super) draws: bool,
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl Parameters {
    fn check(&self, stream: bool) -> Result<(), ApiError> {
        let unsupported = [("watermark", self.watermark.unwrap_or(false)), ("adapter_id", self.adapter_id.is_some())];
        if let Some((name, _)) = unsupported.into_iter().find(|(_, asks)| *asks) {
            return Err(invalid(name, format!("{name} must be absent, null or false: it is not supported")));
        }
        let above = |name, is_above: bool| {
            if is_above { Ok(()) } else { Err(invalid(name, format!("{name} must be above 0, found 0 or less"))) }
        };
        above("temperature", self.temperature.is_none_or(|temperature| temperature > 0.0))?;
        above("top_k", self.top_k.is_none_or(|top_k| top_k > 0))?;
        above("truncate", self.truncate.is_none_or(|truncate| truncate > 0))?;
        if let Some(top) = self.top_n_tokens.filter(|top| *top > MOST_TOP_TOKENS) {
            let message = format!("top_n_tokens must be at most {MOST_TOP_TOKENS}, found {top}");
            return Err(invalid("top_n_tokens", message));
        }
        let best_of = self.best_of.unwrap_or(1);
        if !(1..=MOST_BEST_OF).contains(&best_of) {
            return Err(invalid("best_of", format!("best_of must be from 1 to {MOST_BEST_OF}, found {best_of}")));
        }
        if best_of > 1 && (stream || !self.samples()) {
            let message = "best_of must be absent, null or 1 in a stream, and where do_sample is not true";
            return Err(invalid("best_of", message));
        }
        if best_of > 1 && self.seed.is_some() {
            return Err(invalid("seed", "seed must be absent where best_of is above 1"));
        }
        if stream && self.decoder_input_details.unwrap_or(false) {
            let message = "decoder_input_details must be absent, null or false in a stream";
            return Err(invalid("decoder_input_details", message));
        }
        Ok(())
    }

    /// Whether tokens are drawn: where it is said, or where something is said of how.
    fn samples(&self) -> bool {
        self.do_sample.unwrap_or(false)
            || self.temperature.is_some()
            || self.top_k.is_some()
            || self.top_p.is_some()
            || self.typical_p.is_some()
    }
}

impl Route {
    /// Reads a body: the request for completions, and what its answer needs to know.
    pub(super) fn read(self, body: &[u8], served: &Served) -> Result<(GenerationRequest, Generate), ApiError> {
        let wire: GenerateRequest = parse(body)?;
        let stream = match self {
            Self::Whole => false,
            Self::Stream => true,
            Self::Either => wire.stream.unwrap_or(false),
        };
        let mut parameters = wire.parameters.unwrap_or_default();
        parameters.check(stream)?;
        let inputs = wire.inputs.ok_or_else(|| invalid("inputs", "inputs must be given"))?;
        let ids = served.tokenizer.encode(&inputs);
        let mut ids = ids.map_err(|error| invalid("inputs", format!("inputs: {error}")))?;
        let is_source = served.reads_sources();
        if is_source && parameters.return_full_text.unwrap_or(false) {
            let message =
                "return_full_text must be absent, null or false: the input is a source, no text goes on with it";
            return Err(invalid("return_full_text", message));
        }
        if let Some(truncate) = parameters.truncate.filter(|_| is_source) {
            ids.truncate(truncate);
        } else if let Some(truncate) = parameters.truncate {
            // The end is what is gone on with.
            ids.drain(..ids.len().saturating_sub(truncate));
        }
        let full = parameters.return_full_text.unwrap_or(self == Self::Either && !is_source);
        let generate = Generate {
            listed: self == Self::Either,
            before: if full { inputs } else { String::new() },
            details: parameters.details.unwrap_or(false) || parameters.decoder_input_details.unwrap_or(false),
            prefill: parameters.decoder_input_details.unwrap_or(false),
            best_of: parameters.best_of.and_then(|best_of| usize::try_from(best_of).ok()).unwrap_or(1),
            top: parameters.top_n_tokens.and_then(|top| usize::try_from(top).ok()).unwrap_or(0),
            draws: parameters.samples(),
        };
        let constrained = parameters.grammar.take().map(Form::constrained).transpose()?;
        let request = generate.generation(parameters, ids, stream, served);
        Ok((GenerationRequest { constrained, ..request }, generate))
    }
}

impl Generate {
    fn generation(&self, parameters: Parameters, ids: Vec<u32>, stream: bool, served: &Served) -> GenerationRequest {
        // Each token of a stream comes with its own; who wants no details of a whole text needs none.
        let listed = (stream || self.details || self.best_of > 1).then_some(Logprobs::Top(self.top as u64));
        let default = DEFAULT_MAX_TOKENS.min(served.limits.max_tokens) as u64;
        GenerationRequest {
            prompt: Some(Prompt::Ids(ids)),
            max_tokens: Some(parameters.max_new_tokens.unwrap_or(default)),
            stop: parameters.stop.map(Stop::Many),
            stream: Some(stream),
            // Where nothing is said the defaults are this format's, not the model's.
            temperature: Some(if self.draws { parameters.temperature.unwrap_or(1.0) } else { 0.0 }),
            top_p: Some(parameters.top_p.unwrap_or(1.0)),
            top_k: Some(parameters.top_k.map_or(0, |top_k| i64::try_from(top_k).unwrap_or(i64::MAX))),
            min_p: Some(0.0),
            typical_p: Some(parameters.typical_p.unwrap_or(1.0)),
            repetition_penalty: Some(parameters.repetition_penalty.unwrap_or(1.0)),
            frequency_penalty: Some(parameters.frequency_penalty.unwrap_or(0.0)),
            seed: parameters.seed.map(Seed::Unsigned),
            n: Some(self.best_of as u64),
            logprobs: listed,
            echo: Some(self.prefill),
            ..GenerationRequest::default()
        }
    }
}

impl Foreign for Generate {
    const NAMES: &'static [(&'static str, &'static str)] =
        &[("prompt", "inputs"), ("max_tokens", "max_new_tokens"), ("n", "best_of"), ("echo", "decoder_input_details")];

    fn read(body: &[u8], served: &Served) -> Result<(GenerationRequest, Self), ApiError> {
        Route::Whole.read(body, served)
    }

    fn dialect(self, begun: &Begun<'_>) -> Box<dyn Dialect> {
        Box::new(Answer::new(self, begun))
    }
}
