//! The body of a request for a response, and what of it is refused: what would change the answer and is not here.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::object::{TextFormat, ToolChoice, Truncation};
use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{ChatMessage, Content, Format, GenerationRequest, Seed, Stop};
use crate::api::formats::unsupported::{self, is_same};
use crate::api::openapi::fragments;
use crate::api::openapi::schemas::Grammars;
use crate::api::request::grammar::{Constrained, response_format};
use crate::api::sessions::metadata;

/// What the model is to answer.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of messages")]
pub(super) enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// One thing of the input; only messages are understood.
#[derive(Debug, Deserialize)]
pub(super) struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
}

/// The format of the text.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct TextConfig {
    #[schema(schema_with = fragments::text_format)]
    format: Option<Value>,
    #[schema(pattern = "^medium$")]
    verbosity: Option<String>,
}

/// Options of a stream; only if `stream` is true.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseStreamOptions)]
pub(super) struct StreamOptions {
    /// Not supported: must be false or absent.
    #[schema(schema_with = fragments::never)]
    include_obfuscation: Option<bool>,
}

/// Input to respond to, alone or after an earlier response. `null` is the same as absent.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(super) struct ResponseRequest {
    /// The model's name as in `/v1/models`.
    model: Option<String>,
    #[schema(schema_with = fragments::input)]
    input: Option<Input>,
    /// Read before the input, as a system message.
    pub(super) instructions: Option<String>,
    /// The response to continue from.
    pub(super) previous_response_id: Option<String>,
    /// Whether to store the response, to retrieve it or to continue from it. Default: true.
    pub(super) store: Option<bool>,
    /// Whether to stream the response as server-sent events.
    pub(super) stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[schema(schema_with = fragments::max_tokens)]
    pub(super) max_output_tokens: Option<u64>,
    #[schema(schema_with = fragments::metadata)]
    pub(super) metadata: Option<BTreeMap<String, String>>,
    /// Returned in the response; otherwise unused.
    pub(super) user: Option<String>,
    /// Returned in the response; there are no tools.
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) tool_choice: Option<ToolChoice>,
    pub(super) truncation: Option<Truncation>,
    text: Option<TextConfig>,
    #[schema(schema_with = fragments::no_reasoning)]
    reasoning: Option<BTreeMap<String, Value>>,
    #[schema(schema_with = fragments::stop)]
    stop: Option<Stop>,
    /// 0 always takes the most likely token.
    #[schema(minimum = 0, maximum = 2)]
    pub(super) temperature: Option<f64>,
    /// Sample from the most likely tokens that together have this probability.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub(super) top_p: Option<f64>,
    /// Sample from this many of the most likely tokens; 0 and -1 mean all.
    #[schema(minimum = -1)]
    top_k: Option<i64>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    typical_p: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 10)]
    repetition_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f64>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f64>,
    #[schema(schema_with = fragments::logit_bias)]
    logit_bias: Option<BTreeMap<String, f64>>,
    #[schema(schema_with = fragments::seed)]
    seed: Option<Seed>,
    /// Whether to continue past the end of a text.
    ignore_eos: Option<bool>,
    /// The form that the text must have.
    #[serde(skip)]
    constrained: Option<Constrained>,
    /// The same as it is shown.
    #[serde(skip)]
    pub(super) format: TextFormat,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(value_type = Grammars)]
    rest: BTreeMap<String, Value>,
}

/// Fields that other requests or other servers have, each with the values that ask for nothing.
fn neutral() -> [(&'static str, Vec<Value>); 17] {
    [
        ("background", vec![json!(false)]),
        ("context_management", vec![json!([])]),
        ("conversation", vec![]),
        ("include", vec![json!([])]),
        ("moderation", vec![]),
        ("prompt", vec![]),
        ("service_tier", vec![json!("auto"), json!("default")]),
        ("tools", vec![json!([])]),
        ("top_logprobs", vec![json!(0)]),
        ("return_token_ids", vec![json!(false)]),
        ("return_state", vec![json!(false)]),
        ("state", vec![]),
        ("label", vec![]),
        ("on_disconnect", vec![json!("rollback")]),
        ("n", vec![json!(1)]),
        ("include_stop_str_in_output", vec![json!(false)]),
        ("response_format", vec![]),
    ]
}

/// Fields that have another name here.
const ELSEWHERE: [(&str, &str); 4] = [
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("session", "previous_response_id"),
];

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl ResponseRequest {
    /// Refuses what is not supported, and what is out of its bounds.
    pub(super) fn check(&mut self) -> Result<(), ApiError> {
        self.check_fields()?;
        self.constrained = Constrained::take(&mut self.rest)?;
        unsupported::refuse(Format::Responses, &self.rest)?;
        self.check_text()?;
        metadata(self.metadata.clone().unwrap_or_default())?;
        let asks = |(name, value): (&String, &Value)| !(value.is_null() || (name == "effort" && value == "none"));
        if self.reasoning.iter().flatten().any(asks) {
            return Err(invalid("reasoning", "reasoning must be absent, null or empty: it is not supported"));
        }
        if let Some(options) = &self.stream_options {
            if !self.stream.unwrap_or(false) {
                return Err(invalid("stream_options", "stream_options must be absent unless stream is true"));
            }
            if options.include_obfuscation.unwrap_or(false) {
                let message = "stream_options.include_obfuscation must be absent, null or false: it is not supported";
                return Err(invalid("stream_options", message));
            }
        }
        Ok(())
    }

    fn check_fields(&mut self) -> Result<(), ApiError> {
        for (name, here) in ELSEWHERE {
            if self.rest.remove(name).is_some_and(|value| !value.is_null()) {
                return Err(invalid(name, format!("{name} must be absent: it is {here} here")));
            }
        }
        for (name, neutral) in neutral() {
            let Some(value) = self.rest.remove(name).filter(|value| !value.is_null()) else { continue };
            if !neutral.iter().any(|neutral| is_same(&value, neutral)) {
                let allowed: Vec<String> = neutral.iter().chain([&Value::Null]).map(ToString::to_string).collect();
                let message = format!("{name} must be absent or {}: it is not supported", allowed.join(" or "));
                return Err(invalid(name, message));
            }
        }
        Ok(())
    }

    fn check_text(&mut self) -> Result<(), ApiError> {
        let Some(text) = &self.text else { return Ok(()) };
        if let Some(format) = text.format.clone().filter(|format| !format.is_null()) {
            let shown = serde_json::from_value(format.clone());
            let asked = response_format("text", "text.format", format)?;
            self.format = shown.map_err(|error| invalid("text", format!("text.format: {error}")))?;
            if asked.is_some() && self.constrained.is_some() {
                return Err(invalid("text", "text.format must be of type text where there is another grammar"));
            }
            self.constrained = asked.or(self.constrained.take());
        }
        if text.verbosity.as_ref().is_some_and(|verbosity| verbosity != "medium") {
            return Err(invalid("text", "text.verbosity must be absent, null or medium: it is not supported"));
        }
        Ok(())
    }

    /// The same as a request for chat.
    pub(super) fn into_generation(mut self) -> Result<GenerationRequest, ApiError> {
        let messages = self.messages()?;
        Ok(GenerationRequest {
            model: self.model,
            messages: Some(messages),
            max_tokens: self.max_output_tokens,
            stop: self.stop,
            stream: self.stream,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            typical_p: self.typical_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias,
            seed: self.seed,
            ignore_eos: self.ignore_eos,
            constrained: self.constrained,
            ..GenerationRequest::default()
        })
    }

    /// The instructions and the input, in this order.
    fn messages(&mut self) -> Result<Vec<ChatMessage>, ApiError> {
        let message =
            |role: &str, content| ChatMessage { role: role.into(), content: Some(content), ..ChatMessage::default() };
        let instructions = self.instructions.clone().map(|text| message("system", Content::Text(text)));
        let mut messages: Vec<ChatMessage> = instructions.into_iter().collect();
        match self.input.take() {
            // A response that was cut off goes on where nothing is added.
            None if self.previous_response_id.is_some() => {}
            None => return Err(invalid("input", "input must be given where there is no previous_response_id")),
            Some(Input::Text(text)) => messages.push(message("user", Content::Text(text))),
            Some(Input::Items(items)) => {
                for (at, item) in items.into_iter().enumerate() {
                    messages.push(item.message(at)?);
                }
            }
        }
        Ok(messages)
    }
}

impl Item {
    fn message(self, at: usize) -> Result<ChatMessage, ApiError> {
        if let Some(kind) = self.kind.filter(|kind| kind != "message") {
            return Err(invalid("input", format!("input[{at}] must be a message, found an item of type {kind:?}")));
        }
        let role = match self.role.as_deref() {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role.to_owned(),
            role => {
                let found = role.unwrap_or("none");
                let message = format!("input[{at}].role must be user, assistant, system or developer, found {found}");
                return Err(invalid("input", message));
            }
        };
        Ok(ChatMessage { role, content: self.content, ..ChatMessage::default() })
    }
}
