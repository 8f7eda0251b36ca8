//! The body of a request for a response, and its conversion.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::object::{TextFormat, ToolChoice, Truncation};
use crate::api::error::ApiError;
use crate::api::formats::chat::DEFAULT_MAX_TOKENS;
use crate::api::formats::content::Content;
use crate::api::formats::openai::wire::{ChatMessage, Seed, Stop, logit_bias, messages};
use crate::api::formats::openai::{grammar, invalid, neutral as openai_neutral};
use crate::api::formats::unsupported::{self, Neutral};
use crate::api::request::grammar::GrammarRequest;
use crate::api::request::prompt::Prompt;
use crate::api::request::sampling::SamplingOverrides;
use crate::api::request::{MaxTokens, ParameterNames, TextRequest};
use crate::api::sessions::metadata;

/// What the model answers.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of messages")]
pub(super) enum Input {
    Text(String),
    Items(Vec<Item>),
}

/// One item of the input; only messages are supported.
#[derive(Debug, Deserialize)]
pub(super) struct Item {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
}

/// The format that the text is to have.
#[derive(Debug, Deserialize)]
pub(super) struct TextConfig {
    format: Option<Value>,
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct StreamOptions {
    include_obfuscation: Option<bool>,
}

/// A request for a response as OpenAI defines it, with this server's additions for sampling. A field that is null counts
/// as absent.
#[derive(Debug, Default, Deserialize)]
pub(in crate::api) struct ResponseRequest {
    model: Option<String>,
    input: Option<Input>,
    pub(super) instructions: Option<String>,
    pub(super) previous_response_id: Option<String>,
    pub(super) store: Option<bool>,
    pub(super) stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub(super) max_output_tokens: Option<u64>,
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) user: Option<String>,
    pub(super) parallel_tool_calls: Option<bool>,
    pub(super) tool_choice: Option<ToolChoice>,
    pub(super) truncation: Option<Truncation>,
    text: Option<TextConfig>,
    reasoning: Option<BTreeMap<String, Value>>,
    stop: Option<Stop>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    typical_p: Option<f64>,
    repetition_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<String, f64>>,
    seed: Option<Seed>,
    ignore_eos: Option<bool>,
    json_schema: Option<Value>,
    regex: Option<Value>,
    grammar: Option<Value>,
    structured_outputs: Option<Value>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

fn neutral() -> [Neutral; 17] {
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
const OTHER_NAMES: [(&str, &str); 4] = [
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("session", "previous_response_id"),
];

impl ResponseRequest {
    /// Refuses what is not supported. Returns the text's format as the response shows it, and the grammar.
    pub(super) fn check(&mut self) -> Result<(TextFormat, Option<GrammarRequest>), ApiError> {
        unsupported::refuse_other_names(&self.rest, &OTHER_NAMES)?;
        let own = neutral();
        let is_other = |(name, _): &Neutral| own.iter().all(|(own, _)| own != name);
        let others: Vec<Neutral> = openai_neutral().into_iter().filter(is_other).collect();
        unsupported::refuse(&self.rest, own.into_iter().chain(others))?;
        let format = self.text_format()?;
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
        Ok(format)
    }

    fn text_format(&mut self) -> Result<(TextFormat, Option<GrammarRequest>), ApiError> {
        let other = grammar::read([
            ("json_schema", self.json_schema.take()),
            ("regex", self.regex.take()),
            ("grammar", self.grammar.take()),
            ("structured_outputs", self.structured_outputs.take()),
            ("guided_json", self.guided_json.take()),
            ("guided_regex", self.guided_regex.take()),
            ("guided_choice", self.guided_choice.take()),
            ("guided_grammar", self.guided_grammar.take()),
        ])?;
        let Some(text) = self.text.take() else { return Ok((TextFormat::default(), other)) };
        if text.verbosity.is_some_and(|verbosity| verbosity != "medium") {
            return Err(invalid("text", "text.verbosity must be absent, null or medium: it is not supported"));
        }
        let Some(format) = text.format.filter(|format| !format.is_null()) else {
            return Ok((TextFormat::default(), other));
        };
        let asked = grammar::response_format("text", "text.format", format.clone())?;
        let shown = serde_json::from_value(format).map_err(|error| invalid("text", format!("text.format: {error}")))?;
        if asked.is_some() && other.is_some() {
            return Err(invalid("text", "text.format must be of type text if there is another grammar"));
        }
        Ok((shown, asked.or(other)))
    }

    /// The internal request, after [`Self::check`].
    pub(super) fn convert(mut self, grammar: Option<GrammarRequest>) -> Result<TextRequest, ApiError> {
        let names = ParameterNames::openai("input", "max_output_tokens");
        let prompt = Prompt::Messages { messages: messages(self.messages()?, "input")?, prefill: None };
        let max_tokens = self.max_output_tokens.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Given);
        Ok(TextRequest {
            model: self.model,
            stop: Stop::all(self.stop),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
                typical_p: self.typical_p,
                repetition_penalty: self.repetition_penalty,
                frequency_penalty: self.frequency_penalty,
                presence_penalty: self.presence_penalty,
                logit_bias: logit_bias(self.logit_bias)?,
                seed: self.seed.map(Seed::bits),
            },
            grammar,
            ..TextRequest::new(names, prompt, max_tokens)
        })
    }

    /// The instructions and the input, in this order.
    fn messages(&mut self) -> Result<Vec<ChatMessage>, ApiError> {
        let message =
            |role: &str, content| ChatMessage { role: role.into(), content: Some(content), ..ChatMessage::default() };
        let instructions = self.instructions.clone().map(|text| message("system", Content::Text(text)));
        let mut messages: Vec<ChatMessage> = instructions.into_iter().collect();
        match self.input.take() {
            // A response that was cut off can be continued without more input.
            None if self.previous_response_id.is_some() => {}
            None => return Err(invalid("input", "input must be given without previous_response_id")),
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
