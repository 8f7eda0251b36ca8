//! Tool calls as a grammar: the form of a call in the text, and whether plain text is allowed instead.

use serde_json::Value;

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The tool's name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub arguments: Value,
}

/// The tool calls that an answer may contain. A call is the JSON object `{"name": "…", "arguments": {…}}` with exactly
/// these keys in this order and one space after each colon and after the comma between them. Calls are separated by line
/// feeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Calls {
    /// The tools.
    pub tools: Vec<Call>,
    /// Most calls in one answer; at least 1.
    pub max: usize,
    /// Whether the answer may be plain text instead, which is any text that does not begin with `{"name": `.
    pub or_text: bool,
}

impl Calls {
    /// The beginning of every call, which distinguishes calls from plain text.
    pub const OPENING: &str = r#"{"name": "#;

    /// The part of a call before its arguments.
    pub fn head(name: &str) -> String {
        format!(r#"{}{}, "arguments": "#, Self::OPENING, Value::from(name))
    }
}
