//! The JSON schema that a message must follow: `output_config.format`, or `output_format`, its older name.

use serde_json::{Map, Value};

use crate::api::error::ApiError;
use crate::api::formats::openai::grammar::object;
use crate::api::openapi::schemas::json_schemas;
use crate::api::request::grammar::GrammarRequest;
use crate::api::request::tools::MAX_NAME;
use crate::text::GrammarSpec;

const CONFIG: &str = "output_config";

/// The field `output_config`.
pub(super) struct OutputConfigField;

/// The field `output_format`.
pub(super) struct OutputFormatField;

json_schemas! {
    OutputConfigField: "AnthropicOutputConfig" = {
        "type": "object", "additionalProperties": {"type": "null"}, "properties": {
            "format": {
                "type": ["object", "null"], "required": ["type", "schema"], "additionalProperties": {"type": "null"},
                "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
            },
        },
    };
    OutputFormatField: "AnthropicOutputFormat" = {
        "type": "object", "required": ["type", "schema"], "additionalProperties": {"type": "null"},
        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
    };
}

/// Returns the grammar that the two fields ask for; refuses a grammar in both.
pub(super) fn grammar(config: Option<Value>, format: Option<Value>) -> Result<Option<GrammarRequest>, ApiError> {
    let configured = match config {
        Some(config) => {
            let mut config = object(CONFIG, CONFIG, config)?;
            let format = config.remove("format").filter(|format| !format.is_null());
            nothing_else(CONFIG, CONFIG, &config)?;
            format
        }
        None => None,
    };
    match (configured, format) {
        (None, None) => Ok(None),
        (Some(format), None) => schema(CONFIG, "output_config.format", format).map(Some),
        (None, Some(format)) => schema("output_format", "output_format", format).map(Some),
        (Some(_), Some(_)) => {
            let message = "output_format must be absent beside output_config.format: it is its older name";
            Err(ApiError::invalid(Some("output_format"), message))
        }
    }
}

fn schema(param: &'static str, path: &str, format: Value) -> Result<GrammarRequest, ApiError> {
    let mut format = object(param, path, format)?;
    if format.remove("type").as_ref().and_then(Value::as_str) != Some("json_schema") {
        return Err(ApiError::invalid(Some(param), format!("{path}.type must be json_schema")));
    }
    let Some(schema) = format.remove("schema").filter(|schema| !schema.is_null()) else {
        return Err(ApiError::invalid(Some(param), format!("{path}.schema must be given")));
    };
    nothing_else(param, path, &format)?;
    let path = format!("{path}.schema");
    let schema = object(param, &path, schema)?;
    Ok(GrammarRequest::new(GrammarSpec::JsonSchema(schema.into()), param, path))
}

/// Refuses fields that would change the answer if they were supported.
fn nothing_else(param: &str, path: &str, rest: &Map<String, Value>) -> Result<(), ApiError> {
    let Some((name, _)) = rest.iter().find(|(_, value)| !value.is_null()) else { return Ok(()) };
    let name: String = name.chars().take(MAX_NAME).collect();
    Err(ApiError::invalid(Some(param), format!("{path}.{name} must be absent: it is not supported")))
}
