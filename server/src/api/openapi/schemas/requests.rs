//! Fields of requests that are parsed by hand and so have no type of their own.
#![expect(dead_code, reason = "these types only describe fields")]

use serde_json::Value;
use utoipa::ToSchema;

use super::super::fragments::{anything, response_format, tool_choice, tools};

/// The grammar of the answer; at most one of these.
#[derive(ToSchema)]
pub(in crate::api) struct Grammars {
    #[schema(schema_with = response_format)]
    response_format: Option<Value>,
    /// A regular expression that the whole text must match.
    regex: Option<String>,
    /// A Lark grammar that the whole text must match.
    grammar: Option<String>,
    /// vLLM's form: one of `json`, `regex`, `choice` and `grammar`.
    #[schema(value_type = Option<Object>)]
    structured_outputs: Option<Value>,
    /// A JSON schema that the text must match, as an object or as a string.
    #[schema(schema_with = anything)]
    json_schema: Option<Value>,
    /// The same as `json_schema`.
    #[schema(schema_with = anything)]
    guided_json: Option<Value>,
    /// The same as `regex`.
    guided_regex: Option<String>,
    /// Texts, one of which is the answer.
    #[schema(min_items = 1)]
    guided_choice: Option<Vec<String>>,
    /// The same as `grammar`.
    guided_grammar: Option<String>,
}

/// The tools of a chat.
#[derive(ToSchema)]
pub(in crate::api) struct ToolFields {
    /// Functions that the answer may call.
    #[schema(schema_with = tools)]
    tools: Option<Value>,
    #[schema(schema_with = tool_choice)]
    tool_choice: Option<Value>,
    /// Whether an answer may make several calls.
    parallel_tool_calls: Option<bool>,
}
