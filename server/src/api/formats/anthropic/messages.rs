//! Converts the messages and tools of a request to the form that chat templates take.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::error::ApiError;
use crate::api::formats::content::Content;
use crate::api::formats::wording::complaint;
use crate::api::request::tools::{self, Tools};
use crate::text::Message;

/// A tool that the client runs.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicTool)]
pub(in crate::api) struct Tool {
    #[serde(rename = "type")]
    #[schema(pattern = "^custom$")]
    kind: Option<String>,
    #[schema(pattern = "^[a-zA-Z0-9_-]{1,64}$")]
    name: String,
    description: Option<String>,
    /// The JSON schema of the input.
    #[schema(required, value_type = Object)]
    input_schema: Option<Value>,
}

/// Whether to call a tool, and which.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicToolChoice)]
pub(in crate::api) struct ToolChoice {
    #[serde(rename = "type")]
    #[schema(pattern = "^(auto|any|tool|none)$")]
    kind: String,
    /// The tool to call; required with the type `tool`.
    name: Option<String>,
    /// Default: true.
    disable_parallel_tool_use: Option<bool>,
}

/// One message: a text, or an array of blocks.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicInputMessage)]
pub(in crate::api) struct InputMessage {
    #[schema(pattern = "^(user|assistant)$")]
    role: String,
    #[schema(required, nullable = false)]
    content: Option<InputContent>,
}

/// A string, or an array of blocks.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicContent)]
#[serde(untagged, expecting = "expected a string or an array of blocks")]
enum InputContent {
    Text(String),
    Blocks(Vec<Block>),
}

/// A block of a message: a text, a tool call in an assistant's message, or a tool result in a user's message. An
/// assistant's thinking is accepted, but left out: models do not read the reasoning of earlier answers.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicInputBlock)]
struct Block {
    #[serde(rename = "type")]
    #[schema(pattern = "^(text|tool_use|tool_result|thinking|redacted_thinking)$")]
    kind: String,
    /// Only in a text block.
    text: Option<String>,
    /// Only in a tool call.
    id: Option<String>,
    /// Only in a tool call.
    name: Option<String>,
    /// Only in a tool call.
    #[schema(value_type = Option<Object>)]
    input: Option<Map<String, Value>>,
    /// Only in a tool result: the id of its call.
    tool_use_id: Option<String>,
    /// Only in a tool result: a string, or an array of text blocks.
    content: Option<Value>,
}

fn invalid(param: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(Some(param), message)
}

/// Reads the tools of a request; returns `None` if the answer may not call any.
pub(super) fn tools(tools: Vec<Tool>, choice: Option<ToolChoice>) -> Result<Option<Tools>, ApiError> {
    let tools = tools.into_iter().enumerate().map(|(at, tool)| tool.convert(at)).collect::<Result<Vec<_>, _>>()?;
    // By default, an answer makes at most one call.
    let parallel =
        choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use).is_some_and(|disabled| !disabled);
    Tools::new(tools, choice.map(ToolChoice::convert).transpose()?, parallel)
}

impl Tool {
    fn convert(self, at: usize) -> Result<tools::Tool, ApiError> {
        if let Some(kind) = self.kind.filter(|kind| kind != "custom") {
            let message =
                format!("tools[{at}].type must be absent, null or custom, found {kind:?}: the server runs no tools");
            return Err(invalid("tools", message));
        }
        let Some(schema) = self.input_schema else {
            return Err(invalid("tools", format!("tools[{at}].input_schema must be given")));
        };
        let function = json!({"name": self.name, "description": self.description, "parameters": schema});
        let template = json!({"type": "function", "function": function});
        tools::Tool::new(template, self.name, Some(schema), &format!("tools[{at}]"), "input_schema")
    }
}

impl ToolChoice {
    fn convert(self) -> Result<tools::ToolChoice, ApiError> {
        match (self.kind.as_str(), self.name) {
            ("auto", _) => Ok(tools::ToolChoice::Auto),
            ("any", _) => Ok(tools::ToolChoice::Required),
            ("none", _) => Ok(tools::ToolChoice::None),
            ("tool", Some(name)) => Ok(tools::ToolChoice::Named(name, "tool_choice.name")),
            ("tool", None) => Err(invalid("tool_choice", "tool_choice.name must be given")),
            (kind, _) => {
                let message = format!("tool_choice.type must be auto, any, tool or none, found {kind:?}");
                Err(invalid("tool_choice", message))
            }
        }
    }
}

/// Converts the system prompt and the messages, in this order.
pub(super) fn messages(system: Option<Content>, given: Vec<InputMessage>) -> Result<Vec<Message>, ApiError> {
    // A system prompt alone is not a conversation.
    if given.is_empty() {
        return Ok(Vec::new());
    }
    let mut messages = Vec::with_capacity(given.len() + 1);
    if let Some(system) = system {
        messages.push(message("system", system.text("system")?));
    }
    for (at, message) in given.into_iter().enumerate() {
        message.convert(at, &mut messages)?;
    }
    Ok(messages)
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.to_owned(), content, more: Map::new() }
}

impl InputMessage {
    /// Adds the message to `messages`. Tool results become separate messages, before the rest.
    fn convert(self, at: usize, messages: &mut Vec<Message>) -> Result<(), ApiError> {
        let refused = |message: String| Err(invalid("messages", message));
        let role = self.role.as_str();
        if !["user", "assistant"].contains(&role) {
            return refused(format!(
                "messages[{at}].role must be user or assistant, found {role:?}; the system prompt belongs in system"
            ));
        }
        let blocks = match self.content {
            None => return refused(format!("messages[{at}].content must be given")),
            Some(InputContent::Text(text)) => {
                messages.push(message(role, text));
                return Ok(());
            }
            Some(InputContent::Blocks(blocks)) => blocks,
        };
        let (mut text, mut calls, before) = (String::new(), Vec::new(), messages.len());
        for block in blocks {
            match (block.kind.as_str(), role) {
                ("text", _) => match block.text {
                    Some(more) => text.push_str(&more),
                    None => return refused(format!("messages[{at}] must have texts in its text blocks")),
                },
                ("thinking" | "redacted_thinking", "assistant") => {}
                ("tool_use", "assistant") => {
                    let Some(name) = block.name else {
                        return refused(format!("messages[{at}] must have names in its tool_use blocks"));
                    };
                    let function = json!({"name": name, "arguments": block.input.unwrap_or_default()});
                    calls.push(json!({"id": block.id, "type": "function", "function": function}));
                }
                ("tool_result", "user") => {
                    let content = match block.content {
                        None => String::new(),
                        Some(content) => serde_json::from_value::<Content>(content)
                            .map_err(|error| {
                                invalid("messages", complaint(&format!("messages[{at}].content"), &error))
                            })?
                            .text("messages")?,
                    };
                    let mut result = message("tool", content);
                    result.more.extend(block.tool_use_id.map(|id| ("tool_call_id".into(), id.into())));
                    messages.push(result);
                }
                (kind, role) => {
                    return refused(format!(
                        "messages[{at}] must have blocks of text, or of tool calls and results, found one of type \
                         {kind:?} in a message of role {role}"
                    ));
                }
            }
        }
        let only_results = messages.len() > before && text.is_empty();
        if !calls.is_empty() {
            let mut calling = message(role, text);
            calling.more.insert("tool_calls".into(), calls.into());
            messages.push(calling);
        } else if !only_results {
            messages.push(message(role, text));
        }
        Ok(())
    }
}
