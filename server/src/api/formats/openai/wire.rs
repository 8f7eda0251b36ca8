//! Parts of request bodies that several formats have: stop strings, seeds, messages.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::text::Message;

/// One stop string, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub(in crate::api) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    /// All stop strings of a body.
    pub(in crate::api) fn all(stop: Option<Self>) -> Vec<String> {
        match stop {
            None => Vec::new(),
            Some(Self::One(one)) => vec![one],
            Some(Self::Many(many)) => many,
        }
    }
}

/// A seed: an integer of 64 bits, signed or not.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected an integer of 64 bits")]
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

/// What to add to a stream.
#[derive(Debug, Deserialize)]
pub(in crate::api) struct StreamOptions {
    pub(in crate::api) include_usage: Option<bool>,
    pub(in crate::api) continuous_usage_stats: Option<bool>,
}

/// One message of a conversation.
#[derive(Debug, Default, Deserialize)]
pub(in crate::api) struct ChatMessage {
    pub(in crate::api) role: String,
    pub(in crate::api) content: Option<Content>,
    /// The name of the author.
    pub(in crate::api) name: Option<String>,
    /// The calls that an assistant's message makes.
    pub(in crate::api) tool_calls: Option<Vec<MessageCall>>,
    /// The call that a tool's message answers.
    pub(in crate::api) tool_call_id: Option<String>,
}

/// A call that an earlier answer made.
#[derive(Debug, Deserialize)]
pub(in crate::api) struct MessageCall {
    id: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: CalledFunction,
}

#[derive(Debug, Deserialize)]
struct CalledFunction {
    name: String,
    arguments: String,
}

/// Messages as the chat template takes them. `param` is the field's name.
pub(in crate::api) fn messages(messages: Vec<ChatMessage>, param: &str) -> Result<Vec<Message>, ApiError> {
    messages.into_iter().map(|message| message.convert(param)).collect()
}

impl ChatMessage {
    fn convert(self, param: &str) -> Result<Message, ApiError> {
        let content = match self.content {
            Some(content) => content.text(param)?,
            // A message that calls tools has no other content. An answer that was cut off before the name of its first
            // call has neither, and must be accepted when the client sends it back.
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
    /// The call as templates take it: with its arguments as an object instead of text, if they are complete.
    fn convert(self, param: &str) -> Result<Value, ApiError> {
        if self.kind.as_deref().is_some_and(|kind| kind != "function") {
            return Err(ApiError::invalid(Some(param), format!("{param} must have tool_calls of type function alone")));
        }
        let text = self.function.arguments;
        let arguments = if text.trim().is_empty() {
            Value::Object(Map::new())
        } else {
            // An answer may have been cut off in its arguments. The model then sees the text that it wrote.
            serde_json::from_str(&text).map_or(Value::String(text), Value::Object)
        };
        let function = json!({"name": self.function.name, "arguments": arguments});
        Ok(json!({"id": self.id, "type": "function", "function": function}))
    }
}

/// Biases with token ids as keys.
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
