//! Calls of tools as a grammar: what a call looks like in the text, and where plain text is allowed beside it.

use serde_json::Value;

use super::build::{compact, literal};

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its name.
    pub name: String,
    /// The schema of its arguments.
    pub arguments: Value,
}

/// Which calls an answer may make. One call is the JSON object `{"name": "…", "arguments": {…}}`, written with these
/// two keys in this order and one blank after each colon and comma between them; several are separated by line feeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Calls {
    /// The tools.
    pub tools: Vec<Call>,
    /// Most calls of one answer; at least 1.
    pub most: usize,
    /// Whether the answer may be plain text instead: any text that does not begin with `{"name": `.
    pub or_text: bool,
}

impl Calls {
    /// How every call begins; a text that may also be plain is a call where it begins so.
    pub const OPENING: &str = r#"{"name": "#;

    /// What comes before a call's arguments.
    pub fn head(name: &str) -> String {
        format!(r#"{}{}, "arguments": "#, Self::OPENING, Value::from(name))
    }

    /// As Lark. Each schema stands for itself, so that its references are to itself.
    pub(super) fn lark(&self) -> String {
        let calls: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let mut lark = format!("start: calls{}\n", if self.or_text { " | PLAIN" } else { "" });
        lark += "calls: call";
        if self.most > 1 {
            lark += &format!(" (\"\\n\" call){{0,{}}}", self.most - 1);
        }
        lark += &format!("\ncall: {}\n", calls.join(" | "));
        for (tool, name) in self.tools.iter().zip(&calls) {
            let (head, schema) = (literal(&Self::head(&tool.name)), compact(tool.arguments.clone()));
            lark += &format!("{name}: {head} %json {schema} \"}}\"\n");
        }
        if self.or_text {
            lark += "PLAIN: /(?s:.*)/ & ~/\\{\"name\": (?s:.*)/\n";
        }
        lark
    }
}
