//! The tools that an answer may call.
//!
//! The model writes a call as `{"name": "…", "arguments": {…}}`. The grammar ensures that the name is a tool's and that
//! the arguments follow its schema. With `required`, or a tool's name, the answer is a call. With `auto` it is a call
//! if it begins with `{"name": `, and plain text otherwise; if the request has a JSON schema, the text follows it. An
//! answer makes one call, or with `parallel` up to [`MAX_CALLS`], each on a line of its own.
//!
//! The model sees only what the checkpoint's chat template writes of `tools`. If a template ignores them, the model has
//! to guess from the conversation, but the form of the call still holds.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::api::error::ApiError;
use crate::text::{Call, Calls, GrammarSpec, Instead};

/// Most tools of one request.
const MAX_TOOLS: usize = 128;

/// Most calls of one answer.
const MAX_CALLS: usize = 16;

/// Longest name of a tool or a schema.
pub(in crate::api) const MAX_NAME: usize = 64;

/// Whether to call a tool, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) enum ToolChoice {
    None,
    Auto,
    Required,
    /// The tool with this name. The second field is the path of the name in the request.
    Named(String, &'static str),
}

/// A function that the client runs.
#[derive(Clone, Debug)]
pub(in crate::api) struct Tool {
    /// The tool as chat templates take it, in OpenAI's form.
    template: Value,
    call: Call,
}

impl Tool {
    /// Checks a tool at `path`, with its parameters' JSON schema in the field `schema_name`.
    pub(in crate::api) fn new(
        template: Value,
        name: String,
        schema: Option<Value>,
        path: &str,
        schema_name: &str,
    ) -> Result<Self, ApiError> {
        check_name("tools", &format!("{path}.name"), &name)?;
        let invalid = |message: String| Err(ApiError::invalid(Some("tools"), message));
        let arguments = match schema {
            // A function without parameters.
            None | Some(Value::Null) => json!({"type": "object", "properties": {}, "additionalProperties": false}),
            Some(Value::Object(mut schema)) => {
                // Arguments are always an object, even if the schema does not say so.
                schema.entry("type").or_insert_with(|| "object".into());
                Value::Object(schema)
            }
            Some(_) => return invalid(format!("{path}.{schema_name} must be a JSON schema")),
        };
        if arguments["type"] != "object" {
            return invalid(format!("{path}.{schema_name}.type must be object, found {}", arguments["type"]));
        }
        // As in OpenAI's API, a schema that is not strict is followed as far as possible.
        let strict = template.pointer("/function/strict") == Some(&Value::Bool(true));
        Ok(Self { template, call: Call { name, arguments, strict } })
    }
}

/// The tools of a request, at least one of which may be called.
#[derive(Clone, Debug)]
pub(in crate::api) struct Tools {
    template: Value,
    calls: Vec<Call>,
    choice: ToolChoice,
    parallel: bool,
    /// The schema of answers that are not calls; `None` if they are plain text.
    schema: Option<Value>,
}

impl Tools {
    /// Checks a request's tools; returns `None` if none may be called.
    pub(in crate::api) fn new(
        tools: Vec<Tool>,
        choice: Option<ToolChoice>,
        parallel: bool,
    ) -> Result<Option<Self>, ApiError> {
        let invalid = |param, message: String| Err(ApiError::invalid(Some(param), message));
        if tools.len() > MAX_TOOLS {
            return invalid("tools", format!("tools must hold at most {MAX_TOOLS} tools, found {}", tools.len()));
        }
        let mut names = BTreeSet::new();
        if let Some(Tool { call, .. }) = tools.iter().find(|tool| !names.insert(&tool.call.name)) {
            return invalid("tools", format!("tools must have different names, found {:?} twice", call.name));
        }
        let choice = choice.unwrap_or(ToolChoice::Auto);
        match &choice {
            ToolChoice::Named(name, path) if !names.contains(name) => {
                let name: String = name.chars().take(100).collect();
                return invalid("tool_choice", format!("{path} must be the name of one of tools, found {name:?}"));
            }
            ToolChoice::Required if tools.is_empty() => {
                return invalid("tool_choice", "tool_choice must be none or auto without tools".into());
            }
            _ => {}
        }
        if tools.is_empty() || choice == ToolChoice::None {
            return Ok(None);
        }
        let (template, calls): (Vec<Value>, _) = tools.into_iter().map(|tool| (tool.template, tool.call)).unzip();
        Ok(Some(Self { template: Value::Array(template), calls, choice, parallel, schema: None }))
    }

    /// Whether the answer has to be a call.
    pub(in crate::api) fn must_call(&self) -> bool {
        self.choice != ToolChoice::Auto
    }

    /// Returns the tools as the chat template takes them.
    pub(super) fn template(&self) -> &Value {
        &self.template
    }

    /// Makes answers that are not calls follow a JSON schema.
    pub(super) fn answer_json(&mut self, schema: Value) {
        self.schema = Some(schema);
    }

    /// Returns the grammar of an answer.
    pub(super) fn grammar(&self) -> GrammarSpec {
        GrammarSpec::Calls(self.calls())
    }

    /// Returns the calls that an answer may make.
    pub(in crate::api) fn calls(&self) -> Calls {
        let tools = match &self.choice {
            ToolChoice::Named(name, _) => self.calls.iter().filter(|call| call.name == *name).cloned().collect(),
            _ => self.calls.clone(),
        };
        let max = if self.parallel { MAX_CALLS } else { 1 };
        let instead = match (&self.choice, &self.schema) {
            (ToolChoice::Auto, Some(schema)) => Instead::Json(schema.clone()),
            (ToolChoice::Auto, None) => Instead::Text,
            _ => Instead::Nothing,
        };
        Calls { tools, max, instead }
    }
}

/// Refuses a name, at `path` in the field `param`, that is not valid for a tool or schema.
pub(in crate::api) fn check_name(param: &str, path: &str, name: &str) -> Result<(), ApiError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    let found: String = name.chars().take(MAX_NAME).collect();
    let message = format!("{path} must be 1 to {MAX_NAME} letters, digits, _ and -, found {found:?}");
    Err(ApiError::invalid(Some(param), message))
}
