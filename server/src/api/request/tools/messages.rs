//! Calls of tools in the messages of a conversation, as the client sends them back and as templates take them.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::error::ApiError;

/// A call that an earlier answer has made.
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

impl MessageCall {
    /// The call as templates take it: its arguments are an object there, not the text of one, where they are whole.
    /// `param` is the field's name.
    pub(in crate::api) fn shown(self, param: &str) -> Result<Value, ApiError> {
        if self.kind.as_deref().is_some_and(|kind| kind != "function") {
            return Err(ApiError::invalid(Some(param), format!("{param} must have tool_calls of type function alone")));
        }
        let text = self.function.arguments;
        let arguments = if text.trim().is_empty() {
            Value::Object(Map::new())
        } else {
            // An answer may have been cut off inside them: it comes back as it went out, and the model sees what it wrote.
            serde_json::from_str(&text).map_or(Value::String(text), Value::Object)
        };
        let function = json!({"name": self.function.name, "arguments": arguments});
        Ok(json!({"id": self.id, "type": "function", "function": function}))
    }
}
