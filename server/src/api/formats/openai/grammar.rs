//! The grammar that an answer must follow, under all the names that clients use for it: OpenAI's `response_format`,
//! llama.cpp's `json_schema`, `regex` and `grammar`, and vLLM's `structured_outputs` and `guided_…`.

use serde_json::{Map, Value};

use crate::api::error::ApiError;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::grammar::{GrammarParameters, GrammarRequest};
use crate::api::request::tools::{MAX_NAME, check_name};
use crate::text::GrammarSpec;

/// The pattern of names of schemas and functions, which [`check_name`] checks.
pub(super) const NAME: &str = "^[a-zA-Z0-9_-]{1,64}$";

/// The field `response_format`.
pub(in crate::api) struct ResponseFormat;

json_schemas! {
    ResponseFormat: "ResponseFormat" = {
        "oneOf": [
            {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
            {"type": "object", "required": ["type"], "properties": {
                "type": {"const": "json_object"}, "schema": {"type": ["object", "null"]},
            }},
            {"type": "object", "required": ["type", "json_schema"], "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "required": ["name", "schema"], "properties": {
                    "name": {"type": "string", "pattern": NAME}, "schema": {"type": "object"},
                }},
            }},
        ],
    };
}

/// vLLM's name for the switch in `structured_outputs` that sets [`GrammarParameters::additional_properties`].
const SWITCH: &str = "disable_additional_properties";

/// Returns the grammar that a body's fields ask for; refuses more than one.
pub(in crate::api) fn read(
    fields: impl IntoIterator<Item = (&'static str, Option<Value>)>,
) -> Result<GrammarParameters, ApiError> {
    let mut asked = GrammarParameters::default();
    for (param, value) in fields {
        let Some(mut value) = value.filter(|value| !value.is_null()) else { continue };
        if let Some(disabled) = value.get_mut(SWITCH).filter(|_| param == "structured_outputs").map(Value::take) {
            if !disabled.is_null() {
                asked.additional_properties = !disabled.as_bool().ok_or_else(|| {
                    ApiError::invalid(Some(param), format!("{param}.{SWITCH} must be true or false, found {disabled}"))
                })?;
            }
            // It may be the only entry, beside a grammar in another field or tools.
            if value.as_object().is_some_and(|fields| fields.values().all(Value::is_null)) {
                continue;
            }
        }
        let Some(grammar) = read_field(param, value)? else { continue };
        if let Some(first) = &asked.grammar {
            let message = format!("{param} must be absent beside {}: an answer follows one grammar", first.param);
            return Err(ApiError::invalid(Some(param), message));
        }
        asked.grammar = Some(grammar);
    }
    Ok(asked)
}

fn read_field(param: &'static str, value: Value) -> Result<Option<GrammarRequest>, ApiError> {
    let spec = match param {
        "response_format" => return response_format(param, param, value),
        "structured_outputs" => return structured_outputs(param, value).map(Some),
        "json_schema" | "guided_json" => GrammarSpec::JsonSchema(schema(param, param, value)?),
        "regex" | "guided_regex" => GrammarSpec::Regex(text(param, param, value)?),
        "guided_choice" => GrammarSpec::Choice(texts(param, param, value)?),
        _ => GrammarSpec::Lark(text(param, param, value)?),
    };
    Ok(Some(GrammarRequest::new(spec, param, param)))
}

/// Reads OpenAI's `response_format`, at `path` in the field `param`; returns `None` for plain text.
pub(in crate::api) fn response_format(
    param: &'static str,
    path: &str,
    value: Value,
) -> Result<Option<GrammarRequest>, ApiError> {
    let mut format = object(param, path, value)?;
    let kind = format.remove("type").unwrap_or_default();
    match kind.as_str() {
        Some("text") => no_other_fields(param, path, &format).map(|()| None),
        Some("json_object") => any_object(param, path, format).map(Some),
        Some("json_schema") => {
            // The Responses API has these fields in the format itself.
            let (path, named) = match format.remove("json_schema") {
                Some(named) => {
                    no_other_fields(param, path, &format)?;
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

/// Reads a `json_object` format. llama.cpp and Together put a schema in `schema`, others in `value`.
fn any_object(param: &'static str, path: &str, mut format: Map<String, Value>) -> Result<GrammarRequest, ApiError> {
    let mut found = None;
    for name in ["schema", "value"] {
        let Some(value) = format.remove(name).filter(|value| !value.is_null()) else { continue };
        let path = format!("{path}.{name}");
        if found.is_some() {
            return Err(ApiError::invalid(Some(param), format!("{path} must be absent beside schema")));
        }
        let spec = GrammarSpec::JsonSchema(schema(param, &path, value)?);
        found = Some(GrammarRequest::new(spec, param, path));
    }
    no_other_fields(param, path, &format)?;
    Ok(found.unwrap_or_else(|| GrammarRequest::new(GrammarSpec::JsonObject, param, path)))
}

/// Refuses unknown fields, because one of them could be a constraint that the answer would not follow.
fn no_other_fields(param: &str, path: &str, rest: &Map<String, Value>) -> Result<(), ApiError> {
    let Some((name, _)) = rest.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
    let name: String = name.chars().take(MAX_NAME).collect();
    Err(ApiError::invalid(Some(param), format!("{path}.{name} must be absent: it is not supported")))
}

/// Checks the types of fields that have no effect.
pub(super) fn check_annotations(param: &str, path: &str, fields: &Map<String, Value>) -> Result<(), ApiError> {
    let invalid = |what: &str| Err(ApiError::invalid(Some(param), format!("{path}.{what}")));
    let given = |name| fields.get(name).filter(|value| !value.is_null());
    if given("strict").is_some_and(|strict| !strict.is_boolean()) {
        return invalid("strict must be true or false");
    }
    if given("description").is_some_and(|text| !text.is_string()) {
        return invalid("description must be a string");
    }
    Ok(())
}

/// Reads a named schema. `strict` has no effect, because a schema is always followed; neither has `description`.
fn named_schema(param: &'static str, path: &str, mut named: Map<String, Value>) -> Result<GrammarRequest, ApiError> {
    let name = text(param, &format!("{path}.name"), named.remove("name").unwrap_or_default())?;
    check_name(param, &format!("{path}.name"), &name)?;
    check_annotations(param, path, &named)?;
    let Some(schema) = named.remove("schema").filter(|schema| !schema.is_null()) else {
        return Err(ApiError::invalid(Some(param), format!("{path}.schema must be given")));
    };
    named.retain(|name, _| !["strict", "description"].contains(&name.as_str()));
    no_other_fields(param, path, &named)?;
    let path = format!("{path}.schema");
    Ok(GrammarRequest::new(GrammarSpec::JsonSchema(schema), param, path))
}

fn structured_outputs(param: &'static str, value: Value) -> Result<GrammarRequest, ApiError> {
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
    Ok(GrammarRequest::new(spec, param, path))
}

/// Returns a schema, which may be given as text.
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
