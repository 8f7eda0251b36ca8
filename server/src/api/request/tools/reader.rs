//! An answer that may call tools, read as it grows: what of it is plain text, and what is a call.

use rand::Rng;
use serde::Serialize;
use serde_json::Value;

use crate::text::Calls;

/// What follows a call's name.
const ARGUMENTS: &str = ", \"arguments\": ";

/// A call as it goes out, whole or a piece of it: only its first piece has more than its place and arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(in crate::api) struct ToolCall {
    /// Its place, in pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

impl ToolCall {
    /// The call's id and the name of what is called; none in further pieces.
    pub(in crate::api) fn head(&self) -> Option<(&str, &str)> {
        self.id.as_deref().zip(self.function.name.as_deref())
    }

    /// The text of its arguments, or of a piece of them.
    pub(in crate::api) fn arguments(&self) -> &str {
        &self.function.arguments
    }
}

/// The function that is called.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The text of a JSON object, or a piece of it; the beginning of one where the answer was cut off.
    arguments: String,
}

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) enum Piece {
    /// Plain text.
    Text(String),
    /// The beginning of a call, or more of its arguments.
    Call(ToolCall),
}

/// Where in the answer the reader is.
#[derive(Debug)]
enum At {
    /// At the beginning, where text and call are told apart.
    Start,
    /// In plain text.
    Plain,
    /// Before a call's arguments.
    Head,
    /// In a call's arguments: braces that are open, whether in a string, and whether behind a backslash in it.
    Arguments { open: usize, string: bool, escaped: bool },
    /// Behind a call's arguments, before the brace that ends the call.
    Tail,
    /// Behind a call.
    Between,
}

/// Reads one answer.
#[derive(Debug)]
pub(in crate::api) struct Reader {
    at: At,
    /// What cannot be told yet.
    held: String,
    calls: Vec<ToolCall>,
}

impl Reader {
    /// One at the beginning of an answer, which may be plain text or not.
    pub(super) fn new(or_text: bool) -> Self {
        Self { at: if or_text { At::Start } else { At::Head }, held: String::new(), calls: Vec::new() }
    }

    /// The calls so far, the last of them perhaps unfinished.
    pub(in crate::api) fn calls(&self) -> Vec<ToolCall> {
        self.calls.clone()
    }

    /// Whether the answer is whole calls.
    pub(in crate::api) fn has_called(&self) -> bool {
        matches!(self.at, At::Between)
    }

    /// Whether the answer is plain text as far as it has come.
    pub(in crate::api) fn is_plain(&self) -> bool {
        matches!(self.at, At::Start | At::Plain)
    }

    /// Takes more of the answer's text.
    pub(in crate::api) fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        // A step that takes nothing waits for more.
        let mut before = 0;
        while !self.held.is_empty() && self.held.len() != before {
            before = self.held.len();
            self.step(out);
        }
    }

    /// The answer has ended: what was held back is text after all, or the beginning of a call without its name.
    pub(in crate::api) fn finish(&mut self, out: &mut Vec<Piece>) {
        let held = std::mem::take(&mut self.held);
        if matches!(self.at, At::Start) && !held.is_empty() {
            self.at = At::Plain;
            out.push(Piece::Text(held));
        }
    }

    /// Takes what can be told off what is held back.
    fn step(&mut self, out: &mut Vec<Piece>) {
        match &mut self.at {
            At::Start => {
                if self.held.starts_with(Calls::OPENING) {
                    self.at = At::Head;
                    self.step(out);
                } else if !Calls::OPENING.starts_with(&self.held) {
                    self.at = At::Plain;
                    self.step(out);
                }
            }
            At::Plain => out.push(Piece::Text(std::mem::take(&mut self.held))),
            At::Head => self.head(out),
            At::Arguments { .. } => self.arguments(out),
            At::Tail => {
                self.held.remove(0);
                self.at = At::Between;
            }
            At::Between => {
                self.held.remove(0);
                self.at = At::Head;
            }
        }
    }

    fn head(&mut self, out: &mut Vec<Piece>) {
        let Some(rest) = self.held.strip_prefix(Calls::OPENING) else { return };
        let Some((name, rest)) = rest.split_once(ARGUMENTS) else { return };
        // The grammar has written it as JSON.
        let Ok(Value::String(name)) = serde_json::from_str(name) else { return };
        let id = format!("call_{:032x}", rand::rng().random::<u128>());
        let function = Function { name: Some(name), arguments: String::new() };
        let call = ToolCall { index: None, id: Some(id), kind: Some("function"), function };
        out.push(Piece::Call(ToolCall { index: Some(self.calls.len()), ..call.clone() }));
        self.calls.push(call);
        self.held = rest.to_owned();
        self.at = At::Arguments { open: 0, string: false, escaped: false };
    }

    fn arguments(&mut self, out: &mut Vec<Piece>) {
        let At::Arguments { open, string, escaped } = &mut self.at else { return };
        let mut end = None;
        for (place, byte) in self.held.bytes().enumerate() {
            match byte {
                _ if *escaped => *escaped = false,
                b'\\' if *string => *escaped = true,
                b'"' => *string = !*string,
                b'{' if !*string => *open += 1,
                b'}' if !*string => {
                    *open -= 1;
                    if *open == 0 {
                        end = Some(place + 1);
                        break;
                    }
                }
                _ => {}
            }
        }
        let rest = end.map(|end| self.held.split_off(end));
        let text = std::mem::replace(&mut self.held, rest.clone().unwrap_or_default());
        if rest.is_some() {
            self.at = At::Tail;
        }
        let index = self.calls.len().checked_sub(1);
        if let Some(call) = self.calls.last_mut().filter(|_| !text.is_empty()) {
            call.function.arguments.push_str(&text);
            let function = Function { name: None, arguments: text };
            out.push(Piece::Call(ToolCall { index, function, ..ToolCall::default() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Plain text, and the name and arguments of each call; pieces put together again must say the same.
    fn read(pieces: &[&str], or_text: bool) -> (String, Vec<(String, String)>) {
        let (mut reader, mut out) = (Reader::new(or_text), Vec::new());
        for piece in pieces {
            reader.push(piece, &mut out);
        }
        reader.finish(&mut out);
        let (mut text, mut said) = (String::new(), Vec::<(String, String)>::new());
        for piece in out {
            match piece {
                Piece::Text(more) => text += &more,
                Piece::Call(call) => match call.function.name {
                    Some(name) => said.push((name, call.function.arguments)),
                    None => said[call.index.unwrap()].1 += &call.function.arguments,
                },
            }
        }
        let whole = reader.calls().into_iter().map(|call| (call.function.name.unwrap(), call.function.arguments));
        assert_eq!(said, whole.collect::<Vec<_>>());
        (text, said)
    }

    #[test]
    fn calls_are_told_from_text() {
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        let one = r#"{"name": "f", "arguments": {"a": "}\\\"{", "b": {}}}"#;
        let arguments = r#"{"a": "}\\\"{", "b": {}}"#;
        for or_text in [false, true] {
            assert_eq!(read(&[one], or_text), (String::new(), vec![call("f", arguments)]));
            let two = format!("{one}\n{}", r#"{"name": "g", "arguments": {}}"#);
            assert_eq!(read(&[&two], or_text), (String::new(), vec![call("f", arguments), call("g", "{}")]));
            let cut = &one[..one.len() - 3];
            assert_eq!(read(&[cut], or_text).1, [call("f", &arguments[..arguments.len() - 2])]);
        }
        for text in ["", "plain", "{\"name\"", "{\"name\":", "{\"nam e\": "] {
            assert_eq!(read(&[text], true), (text.to_owned(), vec![]));
        }
    }

    proptest! {
        #[test]
        fn any_split_says_what_the_whole_says(
            text in prop::sample::select(vec![
                "{\"name\": \"f\", \"arguments\": {\"a\": \"é🦀}\\\\\\\"{\"}}\n{\"name\": \"g-2\", \"arguments\": {}}",
                "{\"name\" is plain, however it goes on: {\"name\": \"f\"",
                "plain 🦀",
            ]),
            cuts in prop::collection::vec(0_usize..80, 0..8),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| text.is_char_boundary(*cut)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(read(&pieces, true), read(&[text], true));
        }
    }
}
