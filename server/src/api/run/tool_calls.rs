//! Splits an answer that may call tools into plain text and calls, as it is generated.

use serde_json::Value;

use crate::api::request::ValidRequest;
use crate::api::request::identity::Identity;
use crate::text::{Calls, Instead};

/// The text between a call's name and its arguments.
const ARGUMENTS: &str = ", \"arguments\": ";

/// A tool call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) struct ToolCall {
    pub(in crate::api) id: String,
    pub(in crate::api) name: String,
    /// The text of a JSON object, or its beginning if the answer was cut off.
    pub(in crate::api) arguments: String,
}

/// A piece of an answer. Calls are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::api) enum Piece {
    Reasoning(String),
    Text(String),
    CallStart { index: usize, id: String, name: String },
    Arguments { index: usize, text: String },
}

/// The parser's position in the answer.
#[derive(Debug)]
enum At {
    /// At the beginning, where text and calls cannot be told apart yet.
    Start,
    /// In plain text.
    Plain,
    /// Before a call's arguments.
    Head,
    /// In a call's arguments: the number of open braces, whether in a string, and whether after a backslash in it.
    Arguments { open: usize, string: bool, escaped: bool },
    /// After a call's arguments, before the brace that ends the call.
    Tail,
    /// After a call.
    Between,
}

/// Splits one answer.
#[derive(Debug)]
pub(in crate::api) struct ToolCallParser {
    at: At,
    /// Text that has not been classified yet.
    held: String,
    calls: Vec<ToolCall>,
    /// Every call begins with one of these, and no other text does.
    openings: Vec<String>,
    identity: Identity,
    /// The index of the answer in its response.
    index: usize,
}

impl ToolCallParser {
    /// Creates a parser for the text `index` of a response; returns `None` if the text cannot call tools.
    pub(in crate::api) fn of(request: &ValidRequest, index: usize) -> Option<Self> {
        let tools = request.tools.as_ref()?;
        Some(Self::new(&tools.calls(), request.identity.clone(), index))
    }

    fn new(calls: &Calls, identity: Identity, index: usize) -> Self {
        let at = if calls.instead == Instead::Nothing { At::Head } else { At::Start };
        let openings = match calls.instead {
            // Other JSON may also begin with the key of a call's name.
            Instead::Json(_) => calls.tools.iter().map(|tool| Calls::head(&tool.name)).collect(),
            Instead::Text | Instead::Nothing => vec![Calls::OPENING.to_owned()],
        };
        Self { at, held: String::new(), calls: Vec::new(), openings, identity, index }
    }

    /// Returns the calls so far, the last of which may be unfinished.
    pub(in crate::api) fn calls(&self) -> &[ToolCall] {
        &self.calls
    }

    /// Whether the answer consists of one or more complete calls.
    pub(in crate::api) fn has_called(&self) -> bool {
        matches!(self.at, At::Between)
    }

    /// Whether the answer is plain text so far.
    pub(in crate::api) fn is_plain(&self) -> bool {
        matches!(self.at, At::Start | At::Plain)
    }

    /// Adds text of the answer.
    pub(in crate::api) fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        // A step that consumes nothing waits for more text.
        let mut before = 0;
        while !self.held.is_empty() && self.held.len() != before {
            before = self.held.len();
            self.step(out);
        }
    }

    /// Ends the answer. What was held back is text after all, or the beginning of a call without its name.
    pub(in crate::api) fn finish(&mut self, out: &mut Vec<Piece>) {
        let held = std::mem::take(&mut self.held);
        if matches!(self.at, At::Start) && !held.is_empty() {
            self.at = At::Plain;
            out.push(Piece::Text(held));
        }
    }

    /// Classifies the beginning of the held text.
    fn step(&mut self, out: &mut Vec<Piece>) {
        match &mut self.at {
            At::Start => {
                if self.openings.iter().any(|opening| self.held.starts_with(opening)) {
                    self.at = At::Head;
                    self.step(out);
                } else if !self.openings.iter().any(|opening| opening.starts_with(&self.held)) {
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
        // The grammar ensures that the name is JSON.
        let Ok(Value::String(name)) = serde_json::from_str(name) else { return };
        let id = format!("call_{}", self.identity.call(self.index, self.calls.len()));
        out.push(Piece::CallStart { index: self.calls.len(), id: id.clone(), name: name.clone() });
        self.calls.push(ToolCall { id, name, arguments: String::new() });
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
        let index = self.calls.len().saturating_sub(1);
        if let Some(call) = self.calls.last_mut().filter(|_| !text.is_empty()) {
            call.arguments.push_str(&text);
            out.push(Piece::Arguments { index, text });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::Call;

    /// Returns the plain text, and the name and arguments of each call. Checks that the joined pieces give the same
    /// calls.
    fn read(pieces: &[&str], instead: Instead) -> (String, Vec<(String, String)>) {
        let tools = ["f", "g-2"].map(|name| Call { name: name.into(), arguments: Value::Bool(true), strict: true });
        let calls = Calls { tools: tools.into(), max: 2, instead };
        let (mut reader, mut out) = (ToolCallParser::new(&calls, Identity::new(), 0), Vec::new());
        for piece in pieces {
            reader.push(piece, &mut out);
        }
        reader.finish(&mut out);
        let (mut text, mut joined) = (String::new(), Vec::<(String, String)>::new());
        for piece in out {
            match piece {
                Piece::Reasoning(more) | Piece::Text(more) => text += &more,
                Piece::CallStart { index, name, .. } => {
                    assert_eq!(index, joined.len());
                    joined.push((name, String::new()));
                }
                Piece::Arguments { index, text } => joined[index].1 += &text,
            }
        }
        let whole = reader.calls().iter().map(|call| (call.name.clone(), call.arguments.clone()));
        assert_eq!(joined, whole.collect::<Vec<_>>());
        (text, joined)
    }

    #[test]
    fn calls_and_text_are_told_apart() {
        let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
        let one = r#"{"name": "f", "arguments": {"a": "}\\\"{", "b": {}}}"#;
        let arguments = r#"{"a": "}\\\"{", "b": {}}"#;
        for instead in [Instead::Nothing, Instead::Text, Instead::Json(Value::Bool(true))] {
            let read = |pieces: &[&str]| read(pieces, instead.clone());
            assert_eq!(read(&[one]), (String::new(), vec![call("f", arguments)]));
            let two = format!("{one}\n{}", r#"{"name": "g-2", "arguments": {}}"#);
            assert_eq!(read(&[&two]), (String::new(), vec![call("f", arguments), call("g-2", "{}")]));
            let cut = &one[..one.len() - 3];
            assert_eq!(read(&[cut]).1, [call("f", &arguments[..arguments.len() - 2])]);
        }
        for text in ["", "plain", "{\"name\"", "{\"name\":", "{\"nam e\": "] {
            assert_eq!(read(&[text], Instead::Text), (text.to_owned(), vec![]));
        }
        for text in
            ["{", r#"{"name": "f"#, r#"{"name": "f"}"#, r#"{"name": "h", "arguments": {}}"#, r#"{"name": "f", "a": 1}"#]
        {
            assert_eq!(read(&[text], Instead::Json(Value::Bool(true))), (text.to_owned(), vec![]));
        }
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_result(
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
            for instead in [Instead::Text, Instead::Json(Value::Bool(true))] {
                prop_assert_eq!(read(&pieces, instead.clone()), read(&[text], instead));
            }
        }
    }
}
