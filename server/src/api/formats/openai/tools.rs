//! Tools in OpenAI's formats for `/v1/chat/completions` and `/v1/responses`.

use serde_json::{Map, Value, json};

use super::grammar::{NAME, check_annotations, object, text};
use crate::api::error::ApiError;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::tools::{Tool, ToolChoice, Tools};

/// The field `tools`.
pub(in crate::api::formats) struct ToolsField;

/// The field `tool_choice`.
pub(in crate::api::formats) struct ToolChoiceField;

/// The field `tools` of the Responses API.
pub(in crate::api::formats) struct FlatTool;

/// The field `tool_choice` of the Responses API.
pub(in crate::api::formats) struct FlatToolChoice;

json_schemas! {
    ToolsField: "Tools" = {
        "type": "array", "maxItems": 128, "items": {
            "type": "object", "required": ["type", "function"], "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {
                    "name": {"type": "string", "pattern": NAME},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                }},
            },
        },
    };
    FlatTool: "ResponseTool" = {
        "type": "object", "required": ["type", "name"], "properties": {
            "type": {"const": "function"},
            "name": {"type": "string", "pattern": NAME},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
            "strict": {"type": ["boolean", "null"]},
        },
    };
    FlatToolChoice: "ResponseToolChoice" = {
        "oneOf": [
            {"enum": ["none", "auto", "required"]},
            {"type": "object", "required": ["type", "name"], "properties": {
                "type": {"const": "function"},
                "name": {"type": "string", "pattern": NAME},
            }},
        ],
    };
    ToolChoiceField: "ChatToolChoice" = {
        "oneOf": [
            {"enum": ["none", "auto", "required"]},
            {"type": "object", "required": ["type", "function"], "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {
                    "name": {"type": "string", "pattern": NAME},
                }},
            }},
        ],
    };
}

/// Reads the tools of a body; returns `None` if the answer may not call any.
pub(in crate::api::formats) fn read(
    tools: Option<Value>,
    choice: Option<Value>,
    parallel: Option<bool>,
) -> Result<Option<Tools>, ApiError> {
    let Value::Array(tools) = tools.unwrap_or_else(|| Value::Array(Vec::new())) else {
        return Err(ApiError::invalid(Some("tools"), "tools must be an array"));
    };
    let tools = tools.into_iter().enumerate().map(|(at, tool)| function(tool, &format!("tools[{at}]")));
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    Tools::new(tools, choice.map(tool_choice).transpose()?, parallel.unwrap_or(false))
}

/// Reads tools in the form of the Responses API, which has a function's fields in the tool itself. There, an answer may
/// make several calls by default.
pub(in crate::api::formats) fn read_flat(
    tools: &[Map<String, Value>],
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<Option<Tools>, ApiError> {
    let tools = tools.iter().enumerate().map(|(at, fields)| {
        let path = format!("tools[{at}]");
        check_type("tools", &path, fields)?;
        let mut fields = fields.clone();
        fields.remove("type");
        // Chat templates know only the form of chat.
        let tool = json!({"type": "function", "function": fields});
        named_function(tool, fields, &path)
    });
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    Tools::new(tools, choice.map(flat_choice).transpose()?, parallel.unwrap_or(true))
}

fn flat_choice(choice: &Value) -> Result<ToolChoice, ApiError> {
    let param = "tool_choice";
    if choice.is_string() {
        return tool_choice(choice.clone());
    }
    let mut named = object(param, param, choice.clone())?;
    check_type(param, param, &named)?;
    let path = "tool_choice.name";
    Ok(ToolChoice::Named(text(param, path, named.remove("name").unwrap_or_default())?, path))
}

fn tool_choice(choice: Value) -> Result<ToolChoice, ApiError> {
    let param = "tool_choice";
    if let Value::String(word) = &choice {
        return match word.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => Ok(ToolChoice::Required),
            _ => {
                let message = format!("tool_choice must be none, auto, required or a function, found {word:?}");
                Err(ApiError::invalid(Some(param), message))
            }
        };
    }
    let mut named = object(param, param, choice)?;
    check_type(param, param, &named)?;
    let mut function = object(param, "tool_choice.function", named.remove("function").unwrap_or_default())?;
    let path = "tool_choice.function.name";
    Ok(ToolChoice::Named(text(param, path, function.remove("name").unwrap_or_default())?, path))
}

fn check_type(param: &str, path: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    if fields.get("type").is_some_and(|kind| kind == "function") {
        return Ok(());
    }
    let found = fields.get("type").unwrap_or(&Value::Null);
    let found: String = found.to_string().chars().take(100).collect();
    Err(ApiError::invalid(Some(param), format!("{path}.type must be function, found {found}")))
}

/// Reads one tool, which must be a function.
fn function(tool: Value, path: &str) -> Result<Tool, ApiError> {
    let mut fields = object("tools", path, tool.clone())?;
    check_type("tools", path, &fields)?;
    let path = format!("{path}.function");
    let function = object("tools", &path, fields.remove("function").unwrap_or_default())?;
    named_function(tool, function, &path)
}

/// Reads the function with these fields, which are at `path`. Chat templates get it as `tool`.
fn named_function(tool: Value, mut function: Map<String, Value>, path: &str) -> Result<Tool, ApiError> {
    check_annotations("tools", path, &function)?;
    let name = text("tools", &format!("{path}.name"), function.remove("name").unwrap_or_default())?;
    Tool::new(tool, name, function.remove("parameters"), path, "parameters")
}
