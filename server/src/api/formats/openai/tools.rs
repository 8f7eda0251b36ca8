//! Tools in OpenAI's format.

use serde_json::{Map, Value};

use super::grammar::{object, text};
use crate::api::error::ApiError;
use crate::api::request::tools::{Tool, ToolChoice, Tools};

/// The tools of a body; none if nothing may be called.
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
    Err(ApiError::invalid(Some(param), format!("{path}.type must be function, found {found}")))
}

/// One tool, which is a function.
fn function(tool: Value, path: &str) -> Result<Tool, ApiError> {
    let mut fields = object("tools", path, tool.clone())?;
    check_type("tools", path, &fields)?;
    let path = format!("{path}.function");
    let mut function = object("tools", &path, fields.remove("function").unwrap_or_default())?;
    let name = text("tools", &format!("{path}.name"), function.remove("name").unwrap_or_default())?;
    Tool::new(tool, name, function.remove("parameters"), &path, "parameters")
}
