//! Tools in Anthropic's words: what a request says of them, and calls and their results in its messages.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::ChatMessage;
use crate::api::request::tools::Tools;

/// A tool that the client runs.
#[derive(Debug, Deserialize)]
pub(super) struct Tool {
    #[serde(rename = "type")]
    kind: Option<String>,
    name: String,
    description: Option<String>,
    input_schema: Option<Value>,
}

/// Whether and what to call.
#[derive(Debug, Deserialize)]
pub(super) struct ToolChoice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

/// One message: a text, or blocks.
#[derive(Debug, Deserialize)]
pub(super) struct InputMessage {
    role: String,
    content: Option<InputContent>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of blocks")]
enum InputContent {
    Text(String),
    Blocks(Vec<Block>),
}

/// A block of a message.
#[derive(Debug, Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Map<String, Value>>,
    tool_use_id: Option<String>,
    content: Option<Value>,
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

/// The tools as the other formats have them.
pub(super) fn tools(tools: Vec<Tool>, choice: Option<ToolChoice>) -> Result<Option<Tools>, ApiError> {
    let mut fields = BTreeMap::new();
    let mut functions = Vec::with_capacity(tools.len());
    for (at, tool) in tools.into_iter().enumerate() {
        if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
            let message = format!("tools[{at}].type must be absent, null or custom: nothing runs here, found {kind:?}");
            return Err(invalid("tools", message));
        }
        let Some(schema) = tool.input_schema else {
            return Err(invalid("tools", format!("tools[{at}].input_schema must be given")));
        };
        let function = json!({"name": tool.name, "description": tool.description, "parameters": schema});
        functions.push(json!({"type": "function", "function": function}));
    }
    fields.insert("tools".into(), functions.into());
    if let Some(choice) = choice {
        let said = match (choice.kind.as_str(), choice.name) {
            ("auto", _) => json!("auto"),
            ("any", _) => json!("required"),
            ("none", _) => json!("none"),
            ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
            ("tool", None) => return Err(invalid("tool_choice", "tool_choice.name must be given")),
            (kind, _) => {
                let message = format!("tool_choice.type must be auto, any, tool or none, found {kind:?}");
                return Err(invalid("tool_choice", message));
            }
        };
        fields.insert("tool_choice".into(), said);
        // One call is made at a time where nobody says that several may be.
        let parallel = choice.disable_parallel_tool_use.is_some_and(|disabled| !disabled);
        fields.insert("parallel_tool_calls".into(), parallel.into());
    }
    Tools::take(&mut fields)
}

impl InputMessage {
    pub(super) fn role(&self) -> &str {
        &self.role
    }

    /// The same as the other formats have it: results of calls are messages of their own, before the rest.
    pub(super) fn into_chat(self, at: usize) -> Result<Vec<ChatMessage>, ApiError> {
        let refused = |message: String| invalid("messages", message);
        let blocks = match self.content {
            None => return Err(refused(format!("messages[{at}].content must be given"))),
            Some(InputContent::Text(text)) => return chat(vec![json!({"role": self.role, "content": text})]),
            Some(InputContent::Blocks(blocks)) => blocks,
        };
        let (mut said, mut calls, mut results) = (String::new(), Vec::new(), Vec::new());
        for block in blocks {
            match (block.kind.as_str(), self.role.as_str()) {
                ("text", _) => {
                    let missing = || refused(format!("messages[{at}] must have texts in its text blocks"));
                    said.push_str(&block.text.ok_or_else(missing)?);
                }
                ("tool_use", "assistant") => {
                    let arguments = Value::Object(block.input.unwrap_or_default()).to_string();
                    let Some(name) = block.name else {
                        return Err(refused(format!("messages[{at}] must have names in its tool_use blocks")));
                    };
                    let function = json!({"name": name, "arguments": arguments});
                    calls.push(json!({"id": block.id, "type": "function", "function": function}));
                }
                ("tool_result", "user") => {
                    let content = block.content.unwrap_or_else(|| "".into());
                    results.push(json!({"role": "tool", "tool_call_id": block.tool_use_id, "content": content}));
                }
                (kind, role) => {
                    let message = format!(
                        "messages[{at}] must have blocks of text, or of tool calls and results, found one of type \
                         {kind:?} in a message of role {role}"
                    );
                    return Err(refused(message));
                }
            }
        }
        if !calls.is_empty() {
            results.push(json!({"role": self.role, "content": said, "tool_calls": calls}));
        } else if results.is_empty() || !said.is_empty() {
            results.push(json!({"role": self.role, "content": said}));
        }
        chat(results)
    }
}

fn chat(messages: Vec<Value>) -> Result<Vec<ChatMessage>, ApiError> {
    let read = serde_json::from_value(Value::Array(messages));
    read.map_err(|error| invalid("messages", format!("messages: {error}")))
}
