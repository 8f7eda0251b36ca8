//! The grammar of tool calls: how a call is written in the text, and what an answer may be instead of calls.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub arguments: Value,
    /// Whether to refuse a schema with a part that the compiler does not support. Otherwise that part is ignored.
    pub strict: bool,
}

/// The tool calls that an answer may contain. A call is the JSON object `{"name": "…", "arguments": {…}}` with exactly
/// these keys in this order and one space after each colon and after the comma between them. Calls are separated by line
/// feeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// The tools.
    pub tools: Vec<Call>,
    /// Most calls in one answer; at least 1.
    pub max: usize,
    /// What the answer may be instead of calls.
    pub instead: Instead,
}

/// What an answer may be instead of calls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Instead {
    /// Nothing: the answer must be calls.
    Nothing,
    /// Plain text, which is any text that does not begin with `{"name": `.
    Text,
    /// JSON that matches this schema, with one space after each colon and comma. It must not be able to begin like a
    /// call of one of the tools.
    Json(Value),
}

impl Calls {
    /// The beginning of every call, which distinguishes a call from plain text.
    pub const OPENING: &str = r#"{"name": "#;

    /// Returns the part of a call before its arguments.
    pub fn head(name: &str) -> String {
        format!(r#"{}{}, "arguments": "#, Self::OPENING, Value::from(name))
    }
}
