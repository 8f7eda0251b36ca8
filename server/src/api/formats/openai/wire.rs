//! Parts of request bodies that several formats share: stop strings, seeds, messages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::api::openapi::literals::literals;
use crate::api::openapi::schemas::json_schemas;
use crate::text::Message;

/// One stop string, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub(in crate::api) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    /// Returns all stop strings of a body.
    pub(in crate::api) fn all(stop: Option<Self>) -> Vec<String> {
        match stop {
            None => Vec::new(),
            Some(Self::One(one)) => vec![one],
            Some(Self::Many(many)) => many,
        }
    }
}

/// A seed: a 64-bit integer, signed or unsigned.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged, expecting = "expected a whole number of at most 64 bits")]
pub(in crate::api) enum Seed {
    Unsigned(u64),
    Signed(i64),
}

impl Seed {
    pub(in crate::api) fn bits(self) -> u64 {
        match self {
            Self::Unsigned(seed) => seed,
            Self::Signed(seed) => seed.cast_unsigned(),
        }
    }
}

/// Biases by token id.
pub(in crate::api) struct LogitBias;

json_schemas! {
    Stop: "Stop" = {
        "description": "Up to 16 strings of up to 1,024 bytes that end the text; they are not part of it.",
        "oneOf": [
            {"type": "string", "minLength": 1, "maxLength": 1024},
            {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
        ],
    };
    Seed: "Seed" = {"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX};
    LogitBias: "LogitBias" = {
        "description": "Values added to the logits, by token id.",
        "type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    };
}

literals!(FunctionKind = "function");

/// Options of a stream; only if `stream` is true.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct StreamOptions {
    /// Whether the stream ends with a chunk without choices that has the usage. Default: false.
    pub(in crate::api) include_usage: Option<bool>,
    /// Whether every chunk has the usage so far; only with `include_usage`. Default: false.
    pub(in crate::api) continuous_usage_stats: Option<bool>,
}

/// One message of a conversation. It must have content or tool calls.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = Message)]
pub(in crate::api) struct ChatMessage {
    #[schema(pattern = "^(system|developer|user|assistant|tool)$")]
    pub(in crate::api) role: String,
    pub(in crate::api) content: Option<Content>,
    /// The name of the author, which tells participants of the same role apart.
    pub(in crate::api) name: Option<String>,
    /// The tool calls of an assistant's message.
    pub(in crate::api) tool_calls: Option<Vec<MessageCall>>,
    /// The id of the call that a tool's message answers.
    pub(in crate::api) tool_call_id: Option<String>,
}

/// A tool call that an earlier answer made.
#[derive(Debug, Deserialize, ToSchema)]
pub(in crate::api) struct MessageCall {
    id: Option<String>,
    #[serde(rename = "type")]
    #[schema(value_type = Option<FunctionKind>)]
    kind: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = MessageFunction)]
struct CalledFunction {
    name: String,
    /// A JSON object as text.
    arguments: String,
}

/// The roles of messages.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Converts messages to the form that the chat template takes. `param` is the field's name.
pub(in crate::api) fn messages(messages: Vec<ChatMessage>, param: &str) -> Result<Vec<Message>, ApiError> {
    let convert = |(at, message): (usize, ChatMessage)| {
        if ROLES.contains(&message.role.as_str()) {
            return message.convert(param);
        }
        let (known, found): (_, String) = (ROLES.join(", "), message.role.chars().take(100).collect());
        Err(ApiError::invalid(Some(param), format!("{param}[{at}].role must be one of {known}, found {found:?}")))
    };
    messages.into_iter().enumerate().map(convert).collect()
}

impl ChatMessage {
    fn convert(self, param: &str) -> Result<Message, ApiError> {
        let content = match self.content {
            Some(content) => content.text(param)?,
            // A message that calls tools has no other content. An answer that was cut off before the name of its first
            // call has neither content nor calls, and must be accepted when the client sends it back.
            None if self.role == "assistant" => String::new(),
            None => return Err(ApiError::invalid(Some(param), format!("{param} must all have content"))),
        };
        let mut more = Map::new();
        let calls = self.tool_calls.unwrap_or_default().into_iter().map(|call| call.convert(param));
        let calls = calls.collect::<Result<Vec<_>, _>>()?;
        if !calls.is_empty() {
            more.insert("tool_calls".into(), calls.into());
        }
        more.extend(self.tool_call_id.map(|id| ("tool_call_id".into(), id.into())));
        more.extend(self.name.map(|name| ("name".into(), name.into())));
        // Templates do not know the newer name of this role.
        let role = if self.role == "developer" { "system".to_owned() } else { self.role };
        Ok(Message { role, content, more })
    }
}

impl MessageCall {
    pub(in crate::api::formats) fn new(id: String, name: String, arguments: String) -> Self {
        Self { id: Some(id), kind: None, function: CalledFunction { name, arguments } }
    }

    /// Converts the call to the form that templates take: its arguments become an object instead of text if they are
    /// complete.
    fn convert(self, param: &str) -> Result<Value, ApiError> {
        if self.kind.as_deref().is_some_and(|kind| kind != "function") {
            return Err(ApiError::invalid(Some(param), format!("{param} must have tool_calls of type function alone")));
        }
        let text = self.function.arguments;
        let arguments = if text.trim().is_empty() {
            Value::Object(Map::new())
        } else {
            // The answer may have been cut off in the arguments. The model then sees the text that it wrote.
            serde_json::from_str(&text).map_or(Value::String(text), Value::Object)
        };
        let function = json!({"name": self.function.name, "arguments": arguments});
        Ok(json!({"id": self.id, "type": "function", "function": function}))
    }
}

/// Converts biases that have token ids as keys.
pub(in crate::api) fn logit_bias(biases: Option<BTreeMap<String, f64>>) -> Result<Vec<(u32, f64)>, ApiError> {
    let bias = |(key, bias): (String, f64)| {
        // One spelling for each id: `7`, `07` and `+7` would be one token with three biases.
        let id = key.parse::<u32>().ok().filter(|id| id.to_string() == key).ok_or_else(|| {
            ApiError::invalid(Some("logit_bias"), format!("logit_bias must have token ids as keys, found {key:?}"))
        })?;
        Ok((id, bias))
    };
    biases.into_iter().flatten().map(bias).collect()
}
