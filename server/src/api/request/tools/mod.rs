//! Tools that an answer may call: what a request says of them, and what the model is let write.
//!
//! A call is written as `{"name": "…", "arguments": {…}}`, and the grammar sees to it: the name is that of a tool, and
//! the arguments follow its schema. With `tool_choice` `required`, or a tool's name, the answer is a call. With `auto`
//! it is a call where it begins with `{"name": `, and plain text where it begins otherwise: nothing else of a text is
//! ever taken for a call, and what begins as one is one. One answer makes one call; where `parallel_tool_calls` is
//! true it may make up to [`MAX_CALLS`], each in a line of its own.
//!
//! What the model reads of the tools is what the checkpoint's chat template writes of `tools`. A template that writes
//! nothing of them leaves the model to guess from the conversation; the form of the call holds all the same.

mod messages;
mod reader;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::api::error::ApiError;
use crate::api::request::grammar::{Constrained, bad_name, is_name, object, text};
use crate::text::{Call, Calls, GrammarSpec};

pub(in crate::api) use self::messages::MessageCall;
pub(in crate::api) use self::reader::{Piece, Reader, ToolCall};

/// Most tools of one request.
const MAX_TOOLS: usize = 128;

/// Most calls of one answer.
pub(in crate::api) const MAX_CALLS: usize = 16;

/// Whether and what to call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    Required,
    Named(String),
}

/// The tools of a request, none of which may be called where it says so.
#[derive(Clone, Debug)]
pub(in crate::api) struct Tools {
    /// As the request has them, for the template.
    shown: Value,
    calls: Vec<Call>,
    choice: Choice,
    parallel: bool,
}

impl Tools {
    /// The tools of a request's fields, which are taken out; none where nothing may be called.
    pub(in crate::api) fn take(fields: &mut BTreeMap<String, Value>) -> Result<Option<Self>, ApiError> {
        let mut field = |name: &str| fields.remove(name).filter(|value| !value.is_null());
        let (tools, choice, parallel) = (field("tools"), field("tool_choice"), field("parallel_tool_calls"));
        let Value::Array(tools) = tools.unwrap_or_else(|| json!([])) else {
            return Err(ApiError::invalid(Some("tools"), "tools must be an array"));
        };
        if tools.len() > MAX_TOOLS {
            let message = format!("tools must hold at most {MAX_TOOLS} tools, found {}", tools.len());
            return Err(ApiError::invalid(Some("tools"), message));
        }
        let parallel = match parallel {
            None => false,
            Some(Value::Bool(parallel)) => parallel,
            Some(_) => {
                let message = "parallel_tool_calls must be a boolean";
                return Err(ApiError::invalid(Some("parallel_tool_calls"), message));
            }
        };
        let mut names = BTreeSet::new();
        let mut calls = Vec::with_capacity(tools.len());
        for (at, tool) in tools.iter().enumerate() {
            let call = function(tool.clone(), &format!("tools[{at}]"))?;
            if !names.insert(call.name.clone()) {
                let message = format!("tools must have names of their own, found {:?} twice", call.name);
                return Err(ApiError::invalid(Some("tools"), message));
            }
            calls.push(call);
        }
        let choice = Choice::read(choice, &calls)?;
        if calls.is_empty() || choice == Choice::None {
            return Ok(None);
        }
        Ok(Some(Self { shown: Value::Array(tools), calls, choice, parallel }))
    }

    /// The tools as the chat template takes them.
    pub(in crate::api) fn shown(&self) -> &Value {
        &self.shown
    }

    /// What the answer must follow.
    pub(in crate::api) fn constrained(&self) -> Constrained {
        let tools = match &self.choice {
            Choice::Named(name) => self.calls.iter().filter(|call| call.name == *name).cloned().collect(),
            _ => self.calls.clone(),
        };
        let most = if self.parallel { MAX_CALLS } else { 1 };
        let calls = Calls { tools, max: most, or_text: self.choice == Choice::Auto };
        Constrained::new(GrammarSpec::Calls(calls), "tools", "tools")
    }

    /// What reads an answer.
    pub(in crate::api) fn reader(&self) -> Reader {
        Reader::new(self.choice == Choice::Auto)
    }
}

impl Choice {
    fn read(choice: Option<Value>, calls: &[Call]) -> Result<Self, ApiError> {
        let invalid = |message: String| Err(ApiError::invalid(Some("tool_choice"), message));
        let choice = match choice {
            None => return Ok(if calls.is_empty() { Self::None } else { Self::Auto }),
            Some(Value::String(word)) => match word.as_str() {
                "none" => return Ok(Self::None),
                "auto" => Self::Auto,
                "required" => Self::Required,
                _ => return invalid(format!("tool_choice must be none, auto, required or a function, found {word:?}")),
            },
            Some(value) => {
                let mut named = object("tool_choice", "tool_choice", value)?;
                check_type("tool_choice", "tool_choice", &named)?;
                let path = "tool_choice.function";
                let mut function = object("tool_choice", path, named.remove("function").unwrap_or_default())?;
                let path = "tool_choice.function.name";
                Self::Named(text("tool_choice", path, function.remove("name").unwrap_or_default())?)
            }
        };
        match &choice {
            Self::Named(name) if !calls.iter().any(|call| call.name == *name) => {
                let name: String = name.chars().take(100).collect();
                invalid(format!("tool_choice.function.name must be that of one of tools, found {name:?}"))
            }
            Self::Required if calls.is_empty() => {
                invalid("tool_choice must be none or auto where there are no tools".into())
            }
            _ => Ok(choice),
        }
    }
}

fn check_type(param: &str, path: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    if fields.get("type").is_some_and(|kind| kind == "function") {
        return Ok(());
    }
    let found = fields.get("type").unwrap_or(&Value::Null);
    Err(ApiError::invalid(Some(param), format!("{path}.type must be function, found {found}")))
}

/// One tool, which is a function.
fn function(tool: Value, path: &str) -> Result<Call, ApiError> {
    let mut tool = object("tools", path, tool)?;
    check_type("tools", path, &tool)?;
    let path = format!("{path}.function");
    let mut function = object("tools", &path, tool.remove("function").unwrap_or_default())?;
    let name_path = format!("{path}.name");
    let name = text("tools", &name_path, function.remove("name").unwrap_or_default())?;
    if !is_name(&name) {
        return Err(bad_name("tools", &name_path, &name));
    }
    let arguments = match function.remove("parameters") {
        // A function without parameters.
        None | Some(Value::Null) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(Value::Object(mut schema)) => {
            // Arguments are an object, also where a schema takes that for granted.
            schema.entry("type").or_insert_with(|| "object".into());
            Value::Object(schema)
        }
        Some(_) => return Err(ApiError::invalid(Some("tools"), format!("{path}.parameters must be a JSON schema"))),
    };
    if arguments["type"] != "object" {
        let message = format!("{path}.parameters.type must be object, found {}", arguments["type"]);
        return Err(ApiError::invalid(Some("tools"), message));
    }
    Ok(Call { name, arguments })
}
