//! The form that an answer must have, under all the names by which clients ask for it: `response_format` as OpenAI has
//! it, llama.cpp's `json_schema`, `regex` and `grammar`, and vLLM's `structured_outputs` and `guided_…`.
//!
//! An answer follows its grammar from its first token to its last. One that is cut off at `max_tokens`
//! (`finish_reason: "length"`), or by a stop string, is a beginning of what the grammar allows, and may be unfinished
//! JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::api::error::ApiError;
use crate::api::formats::openai::wire::{Format, GenerationRequest};
use crate::api::request::tools::Tools;
use crate::api::state::Served;
use crate::engine::Grammar;
use crate::text::{GrammarError, GrammarSpec};

/// Longest name of a schema or a tool.
pub(in crate::api) const MAX_NAME: usize = 64;

/// What a request may name its grammar by; one of them.
const FIELDS: [&str; 9] = [
    "response_format",
    "json_schema",
    "regex",
    "grammar",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// A grammar that a request asks for.
#[derive(Clone, Debug)]
pub(in crate::api) struct Constrained {
    spec: GrammarSpec,
    /// The field that asks for it.
    param: &'static str,
    /// Where in that field it stands.
    path: String,
}

impl Constrained {
    /// A grammar that stands at `path` in the field `param`.
    pub(in crate::api) fn new(spec: GrammarSpec, param: &'static str, path: impl Into<String>) -> Self {
        Self { spec, param, path: path.into() }
    }

    /// The grammar of a request's fields, which are taken out; none where the answer is free.
    pub(in crate::api) fn take(fields: &mut BTreeMap<String, Value>) -> Result<Option<Self>, ApiError> {
        let mut found: Option<Self> = None;
        for param in FIELDS {
            let Some(value) = fields.remove(param).filter(|value| !value.is_null()) else { continue };
            let Some(spec) = Self::read(param, value)? else { continue };
            if let Some(first) = &found {
                let message = format!("{param} must be absent beside {}: an answer follows one grammar", first.param);
                return Err(ApiError::invalid(Some(param), message));
            }
            found = Some(spec);
        }
        Ok(found)
    }

    /// What one field asks for.
    fn read(param: &'static str, value: Value) -> Result<Option<Self>, ApiError> {
        let spec = match param {
            "response_format" => return response_format(param, param, value),
            "structured_outputs" => return structured_outputs(param, value).map(Some),
            "json_schema" | "guided_json" => GrammarSpec::JsonSchema(schema(param, param, value)?),
            "regex" | "guided_regex" => GrammarSpec::Regex(text(param, param, value)?),
            "guided_choice" => GrammarSpec::Choice(texts(param, param, value)?),
            _ => GrammarSpec::Lark(text(param, param, value)?),
        };
        Ok(Some(Self::new(spec, param, param)))
    }

    fn compile(&self, served: &Served) -> Result<Arc<dyn Grammar>, ApiError> {
        match served.grammars.compile(&self.spec) {
            Ok(grammar) => Ok(grammar),
            Err(error @ GrammarError::Busy) => {
                let message = format!("{} {error}", self.path);
                Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "grammars_busy", message))
            }
            Err(error) => Err(ApiError::invalid(Some(self.param), format!("{} {error}", self.path))),
        }
    }
}

/// The grammar of a request's answers, where it asks for one. To be called off the connections' threads.
pub(in crate::api) fn grammar(
    format: Format,
    wire: &GenerationRequest,
    served: &Served,
) -> Result<Option<Arc<dyn Grammar>>, ApiError> {
    let calls = wire.tools.as_ref().map(Tools::constrained);
    if format == Format::Completions && calls.is_some() {
        return Err(ApiError::invalid(Some("tools"), "tools must be absent where there are no messages"));
    }
    if let (Some(constrained), Some(_)) = (&wire.constrained, &calls) {
        let param = constrained.param;
        let message = format!("{param} must be absent where tools may be called: an answer follows one grammar");
        return Err(ApiError::invalid(Some(param), message));
    }
    calls.as_ref().or(wire.constrained.as_ref()).map(|asked| asked.compile(served)).transpose()
}

/// OpenAI's form of a form, at `path` in the field `param`; none for plain text.
pub(in crate::api) fn response_format(
    param: &'static str,
    path: &str,
    value: Value,
) -> Result<Option<Constrained>, ApiError> {
    let mut format = object(param, path, value)?;
    let kind = format.remove("type").unwrap_or_default();
    match kind.as_str() {
        Some("text") => nothing_else(param, path, &format).map(|()| None),
        Some("json_object") => any_object(param, path, format).map(Some),
        Some("json_schema") => {
            // The Responses API has the schema's fields in the format itself.
            let (path, named) = match format.remove("json_schema") {
                Some(named) => {
                    nothing_else(param, path, &format)?;
                    let path = format!("{path}.json_schema");
                    (path.clone(), object(param, &path, named)?)
                }
                None => (path.to_owned(), format),
            };
            named_schema(param, &path, named).map(Some)
        }
        _ => {
            let message = format!("{path}.type must be text, json_object or json_schema, found {kind}");
            Err(ApiError::invalid(Some(param), message))
        }
    }
}

/// A form without a name: llama.cpp and Together have a schema as `schema` in it, others as `value`.
fn any_object(param: &'static str, path: &str, mut format: Map<String, Value>) -> Result<Constrained, ApiError> {
    let mut found = None;
    for name in ["schema", "value"] {
        let Some(value) = format.remove(name).filter(|value| !value.is_null()) else { continue };
        let path = format!("{path}.{name}");
        if found.is_some() {
            return Err(ApiError::invalid(Some(param), format!("{path} must be absent beside schema")));
        }
        let spec = GrammarSpec::JsonSchema(schema(param, &path, value)?);
        found = Some(Constrained::new(spec, param, path));
    }
    nothing_else(param, path, &format)?;
    Ok(found.unwrap_or_else(|| Constrained::new(GrammarSpec::JsonObject, param, path)))
}

/// Refuses what is left of a form: what is not known could be a bound on the answer, and the answer would break it.
fn nothing_else(param: &str, path: &str, rest: &Map<String, Value>) -> Result<(), ApiError> {
    let Some((name, _)) = rest.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
    let name: String = name.chars().take(MAX_NAME).collect();
    Err(ApiError::invalid(Some(param), format!("{path}.{name} must be absent: it is not supported")))
}

/// `strict` and `description` say nothing here: a schema is always followed, and nobody reads what it is for.
fn named_schema(param: &'static str, path: &str, mut named: Map<String, Value>) -> Result<Constrained, ApiError> {
    let name = text(param, &format!("{path}.name"), named.remove("name").unwrap_or_default())?;
    if !is_name(&name) {
        return Err(bad_name(param, &format!("{path}.name"), &name));
    }
    if named.get("strict").is_some_and(|strict| !(strict.is_null() || strict.is_boolean())) {
        return Err(ApiError::invalid(Some(param), format!("{path}.strict must be a boolean")));
    }
    let Some(schema) = named.remove("schema").filter(|schema| !schema.is_null()) else {
        return Err(ApiError::invalid(Some(param), format!("{path}.schema must be given")));
    };
    named.retain(|name, _| !["strict", "description"].contains(&name.as_str()));
    nothing_else(param, path, &named)?;
    let path = format!("{path}.schema");
    Ok(Constrained::new(GrammarSpec::JsonSchema(schema), param, path))
}

fn structured_outputs(param: &'static str, value: Value) -> Result<Constrained, ApiError> {
    let mut asked = object(param, param, value)?;
    asked.retain(|_, value| !(value.is_null() || value == &Value::Bool(false)));
    let mut asked = asked.into_iter();
    let (Some((kind, value)), None) = (asked.next(), asked.next()) else {
        let message = format!("{param} must have one of json, json_object, regex, choice and grammar");
        return Err(ApiError::invalid(Some(param), message));
    };
    let path = format!("{param}.{kind}");
    let spec = match kind.as_str() {
        "json" => GrammarSpec::JsonSchema(schema(param, &path, value)?),
        "json_object" if value == Value::Bool(true) => GrammarSpec::JsonObject,
        "regex" => GrammarSpec::Regex(text(param, &path, value)?),
        "choice" => GrammarSpec::Choice(texts(param, &path, value)?),
        "grammar" => GrammarSpec::Lark(text(param, &path, value)?),
        _ => {
            let message =
                format!("{path} must be absent: {param} has one of json, json_object, regex, choice and grammar");
            return Err(ApiError::invalid(Some(param), message));
        }
    };
    Ok(Constrained::new(spec, param, path))
}

/// Whether a name is one of a schema or a tool.
pub(in crate::api) fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(allowed)
}

/// The refusal of a name that is none.
pub(in crate::api) fn bad_name(param: &str, path: &str, name: &str) -> ApiError {
    let found: String = name.chars().take(MAX_NAME).collect();
    let message = format!("{path} must be 1 to {MAX_NAME} letters, digits, _ and -, found {found:?}");
    ApiError::invalid(Some(param), message)
}

/// A schema, or the text of one.
fn schema(param: &str, path: &str, value: Value) -> Result<Value, ApiError> {
    let Value::String(text) = value else { return Ok(value) };
    let wrong =
        |error| ApiError::invalid(Some(param), format!("{path} must be a JSON schema, or the text of one: {error}"));
    serde_json::from_str(&text).map_err(wrong)
}

pub(in crate::api) fn object(param: &str, path: &str, value: Value) -> Result<Map<String, Value>, ApiError> {
    match value {
        Value::Object(fields) => Ok(fields),
        _ => Err(ApiError::invalid(Some(param), format!("{path} must be an object"))),
    }
}

pub(in crate::api) fn text(param: &str, path: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(ApiError::invalid(Some(param), format!("{path} must be a string"))),
    }
}

fn texts(param: &str, path: &str, value: Value) -> Result<Vec<String>, ApiError> {
    let message = || ApiError::invalid(Some(param), format!("{path} must be an array of strings"));
    let Value::Array(items) = value else { return Err(message()) };
    items.into_iter().map(|item| if let Value::String(text) = item { Ok(text) } else { Err(message()) }).collect()
}
