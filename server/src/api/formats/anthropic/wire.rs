//! The body of a request for a message, and what of it is refused: what would change the answer and is not here.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::tools::{self, InputMessage, Tool, ToolChoice};
use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{ChatMessage, Content, GenerationRequest, Prompt, Stop};
use crate::api::formats::unsupported::is_same;
use crate::api::openapi::fragments;
use crate::api::request::prompt;
use crate::api::request::tools::Tools;
use crate::api::state::Served;
use crate::text::Message;

/// Messages to answer. `null` is the same as absent.
#[derive(Debug, Deserialize, ToSchema)]
pub(super) struct MessagesRequest {
    /// The model's name as in `/v1/models`.
    #[schema(nullable = false, required)]
    model: Option<String>,
    #[schema(required, schema_with = fragments::dialect_messages)]
    messages: Option<Vec<InputMessage>>,
    #[schema(schema_with = fragments::system)]
    system: Option<Content>,
    #[schema(required, schema_with = fragments::required_max_tokens)]
    max_tokens: Option<u64>,
    /// Strings that end the answer; they are not part of it.
    #[schema(max_items = 16)]
    stop_sequences: Option<Vec<String>>,
    /// Whether to stream the answer as server-sent events.
    stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1)]
    temperature: Option<f64>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    top_p: Option<f64>,
    #[schema(minimum = 0, maximum = 4_294_967_295_u64)]
    top_k: Option<u32>,
    /// Functions that the answer may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Tool>>,
    /// Whether and which function to call.
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<ToolChoice>,
    /// Everything else: unknown fields are ignored, known ones that would change the answer are refused.
    #[serde(flatten)]
    #[schema(ignore)]
    rest: BTreeMap<String, Value>,
}

/// A [`MessagesRequest`] whose tokens are counted: only what the model reads.
pub(super) struct CountRequest;

impl PartialSchema for CountRequest {
    fn schema() -> RefOr<Schema> {
        let unused = ["max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"];
        fragments::without(MessagesRequest::schema(), &unused)
    }
}

impl ToSchema for CountRequest {}

/// Fields that would change the answer, each with the values that ask for nothing.
fn neutral() -> [(&'static str, Vec<Value>); 5] {
    [
        ("container", vec![]),
        ("mcp_servers", vec![json!([])]),
        ("output_config", vec![json!({})]),
        ("output_format", vec![]),
        ("thinking", vec![json!({"type": "disabled"})]),
    ]
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

impl MessagesRequest {
    /// What the model reads, and the tools that its answer may call. Where the last message is the assistant's, the
    /// answer goes on with it.
    pub(super) fn read(mut self, served: &Served) -> Result<(Vec<u32>, Option<Tools>), ApiError> {
        self.check(served)?;
        let template = prompt::template(served, "messages")?;
        let tools = tools::tools(self.tools.take().unwrap_or_default(), self.tool_choice.take())?;
        let mut messages = self.messages()?;
        let begun = match messages.last() {
            Some(last) if last.role == "assistant" && last.more.is_empty() => messages.pop(),
            _ => None,
        };
        if begun.is_some() && messages.is_empty() {
            return Err(invalid(
                "messages",
                "messages must hold one before the assistant's that is to be gone on with",
            ));
        }
        if begun.is_some() && tools.is_some() {
            let message = "messages must not end with the assistant's where tools may be called: a call is a whole";
            return Err(invalid("messages", message));
        }
        let refused = |error: String| invalid("messages", format!("messages: {error}"));
        let text = template.render_tools(&messages, tools.as_ref().map(Tools::shown));
        let mut text = text.map_err(|error| refused(error.to_string()))?;
        text.push_str(begun.as_ref().map_or("", |begun| &begun.content));
        let ids = served.tokenizer.encode_chat(&text).map_err(|error| refused(error.to_string()))?;
        Ok((ids, tools))
    }

    /// The same as a request for completions, and the tools.
    pub(super) fn into_generation(mut self, served: &Served) -> Result<(GenerationRequest, Option<Tools>), ApiError> {
        if self.max_tokens.is_none() {
            return Err(invalid("max_tokens", "max_tokens must be given"));
        }
        if let Some(temperature) = self.temperature.filter(|temperature| !(0.0..=1.0).contains(temperature)) {
            return Err(invalid("temperature", format!("temperature must be from 0 to 1, found {temperature}")));
        }
        let request = GenerationRequest {
            max_tokens: self.max_tokens,
            stop: self.stop_sequences.take().map(Stop::Many),
            stream: self.stream,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k.map(i64::from),
            ..GenerationRequest::default()
        };
        let (ids, tools) = self.read(served)?;
        let constrained = tools.as_ref().map(Tools::constrained);
        Ok((GenerationRequest { prompt: Some(Prompt::Ids(ids)), constrained, ..request }, tools))
    }

    fn check(&self, served: &Served) -> Result<(), ApiError> {
        match &self.model {
            Some(model) => served.check_name(model, Some("model"))?,
            None => return Err(invalid("model", "model must be given")),
        }
        for (name, neutral) in neutral() {
            let Some(value) = self.rest.get(name).filter(|value| !value.is_null()) else { continue };
            if !neutral.iter().any(|neutral| is_same(value, neutral)) {
                let allowed: Vec<String> = neutral.iter().chain([&Value::Null]).map(ToString::to_string).collect();
                let message = format!("{name} must be absent or {}: it is not supported", allowed.join(" or "));
                return Err(invalid(name, message));
            }
        }
        Ok(())
    }

    /// The system's words and the messages, in this order.
    fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        let given = self.messages.take().unwrap_or_default();
        if let Some(at) = given.iter().position(|message| !["user", "assistant"].contains(&message.role())) {
            let found = given[at].role();
            let message = format!("messages[{at}].role must be user or assistant, found {found:?}; system has its own");
            return Err(invalid("messages", message));
        }
        let given = given.into_iter().enumerate().map(|(at, message)| message.into_chat(at));
        let given = given.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        let system = self.system.take().map(|content| ChatMessage {
            role: "system".into(),
            content: Some(content),
            ..ChatMessage::default()
        });
        let mut messages = match system {
            Some(system) => vec![system.text("system")?],
            None => Vec::new(),
        };
        messages.extend(prompt::checked(given, "messages")?);
        Ok(messages)
    }
}
