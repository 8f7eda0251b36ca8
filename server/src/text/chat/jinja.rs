//! Runs a chat template within limits. It provides the Jinja dialect and the functions of Hugging Face.
//!
//! Steps, recursion and the length of the result are limited. The length of intermediate strings is not, because
//! templates come from the operator.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use super::message::{ChatError, MAX_BYTES, MAX_STEPS, Message, TemplateInput};

/// Most levels of nested blocks and macros (a macro counts several times): far more than templates use, and far less
/// than a thread's stack allows.
const RECURSION: usize = 120;

/// The template's name in errors.
const NAME: &str = "chat_template";

/// The input of a template.
#[derive(Clone, Copy)]
pub(super) struct Rendering<'a> {
    pub(super) messages: &'a [Message],
    pub(super) input: TemplateInput<'a>,
    /// The current time.
    pub(super) now: DateTime<Utc>,
}

/// A compiled template.
pub(super) struct Jinja {
    source: String,
    environment: Environment<'static>,
}

impl Jinja {
    /// Compiles `source`. `variables` are defined in addition to the messages.
    pub(super) fn compile(source: String, variables: Vec<(&'static str, String)>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(MAX_STEPS));
        environment.set_recursion_limit(RECURSION);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", tojson);
        // Templates that support documents test whether this is none.
        environment.add_global("documents", ());
        for (name, value) in variables {
            environment.add_global(name, value);
        }
        environment.add_template_owned(NAME, without_generation_tags(&source))?;
        Ok(Self { source, environment })
    }

    /// Returns the source that was given to [`Self::compile`].
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation.
    pub(super) fn render(&self, conversation: Rendering) -> Result<String, ChatError> {
        let Rendering { messages, input: TemplateInput { tools, variables, closed, prefill }, now } = conversation;
        let variables = variables.into_iter().flatten().map(|(name, value)| (name.as_str(), from_json(value)));
        let values = context! {
            messages => messages.iter().map(value).collect::<Vec<Value>>(),
            tools => tools.map_or(Value::from(()), from_json),
            add_generation_prompt => !closed,
            continue_final_message => prefill,
            strftime_now => Value::from_function(move |format: &str| date(now, format)),
            ..Value::from_pairs(variables)
        };
        let mut text = Bounded { bytes: Vec::new(), full: false };
        // If the template engine panics, the template has an error.
        let rendered = catch_unwind(AssertUnwindSafe(|| {
            self.environment.get_template(NAME)?.render_captured_to(values, &mut text).map(drop)
        }));
        let rendered = rendered.map_err(|_| ChatError::Failed("the template engine panicked".into()))?;
        if text.full {
            return Err(ChatError::Long);
        }
        rendered.map_err(|error| failure(&error))?;
        String::from_utf8(text.bytes).map_err(|error| ChatError::Failed(error.to_string()))
    }
}

/// Returns a message as a template value.
fn value(message: &Message) -> Value {
    let fields =
        [("role", &message.role), ("content", &message.content)].map(|(name, text)| (name, Value::from(text.as_str())));
    let more = message.more.iter().map(|(name, value)| (name.as_str(), from_json(value)));
    Value::from_pairs(fields.into_iter().chain(more))
}

fn from_json(value: &serde_json::Value) -> Value {
    Value::deserialize(value).expect("a template value can represent any JSON value")
}

/// Replaces `{% generation %}` blocks, which mark training masks, with blocks that are always shown.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let end = tag.find("%}").map_or(tag.len(), |at| at + "%}".len());
        let (tag, after) = tag.split_at(end);
        out.push_str(before);
        match tag.trim_matches(|c: char| "{}%+-".contains(c) || c.is_whitespace()) {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// An exception that the template raised.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(reason: &Value) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "exception").with_source(Raised(reason.to_string())))
}

/// Formats the time in UTC, so that the text does not depend on the server's time zone.
fn date(now: DateTime<Utc>, format: &str) -> Result<String, Error> {
    let mut out = String::new();
    // Unlike `to_string`, this reports unknown formats.
    std::fmt::write(&mut out, format_args!("{}", now.format(format))).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not support the format {format:?}"))
    })?;
    Ok(out)
}

/// Writes JSON as Python's `json.dumps(value, ensure_ascii=False)` does; Jinja's own filter would escape it for HTML.
#[expect(clippy::needless_pass_by_value, reason = "filters receive their options by value")]
fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<String, Error> {
    let indent = indent.or(options.get("indent")?);
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: ensure_ascii must be false"));
    }
    options.assert_all_used()?;
    let json = match indent {
        Some(width) => json(value, PrettyFormatter::with_indent(" ".repeat(width.min(16)).as_bytes())),
        None => json(value, Spaced),
    };
    json.map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("tojson: {error}")))
}

fn json(value: &Value, formatter: impl Formatter) -> Result<String, serde_json::Error> {
    let mut out = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// JSON on one line, with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Collects output up to [`MAX_BYTES`].
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_BYTES {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failure(error: &Error) -> ChatError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(one) = cause {
        if let Some(Raised(reason)) = one.downcast_ref() {
            return ChatError::Refused(reason.clone());
        }
        if one.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::Steps;
        }
        cause = one.source();
    }
    ChatError::Failed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, ChatError> {
        let content = " a<b> 'c' \"d\"\\u003c\u{e9}\n".into();
        let messages = [Message { role: "user".into(), content, ..Message::default() }];
        let now = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
        let conversation = Rendering { messages: &messages, input: TemplateInput::default(), now };
        Jinja::compile(source.into(), Vec::new()).unwrap().render(conversation)
    }

    #[test]
    fn templates_can_use_what_hugging_face_provides() {
        for (source, want) in [
            ("{{ strftime_now('%d %b %Y %H:%M') }}", "14 Nov 2023 22:13"),
            ("{{ messages[0].content | tojson }}", r#"" a<b> 'c' \"d\"\\u003cé\n""#),
            ("{{ {'c': [1, {'b': none}], 'a': 'x'} | tojson }}", r#"{"c": [1, {"b": null}], "a": "x"}"#),
            ("{{ [1] | tojson(indent=2, ensure_ascii=False) }}", "[\n  1\n]"),
            ("{{ messages[0].content.strip().split(' ')[0].startswith(('x', 'a')) }}", "True"),
            ("{% for key, value in messages[0].items() %}{{ key }} {% endfor %}", "role content "),
            ("{{ messages[0].get('name', 'nobody') }}{{ messages[0]['name'] is defined }}", "nobodyFalse"),
            ("{{ tools is none }} {{ documents is not none }} {{ bos_token }}", "True False "),
            ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
            (
                "{{ messages[::-1] | length }}{{ messages | selectattr('role', 'equalto', 'user') | list | count }}",
                "11",
            ),
            ("  {% if true %}\na\n  {%- generation -%}\n b {%+ endgeneration %}\n  {% endif %}\nc\n", "ab c"),
        ] {
            assert_eq!(render(source).as_deref(), Ok(want), "{source}");
        }
    }

    #[test]
    fn errors_name_the_line() {
        for (source, part) in [
            ("a\n{{ messages[0].name.first }}", "undefined"),
            ("a\n{{ messages[0].content | nothing }}", "unknown filter"),
            ("a\n{{ messages[0].append(1) }}", "append"),
            ("a\n{{ strftime_now('%Q') }}", "strftime_now does not support the format \"%Q\""),
        ] {
            let error = render(source).unwrap_err();
            let ChatError::Failed(reason) = &error else { panic!("{error:?}") };
            assert!(reason.contains(part) && reason.contains("chat_template:2"), "{reason}");
        }
    }

    #[test]
    fn an_exception_inside_a_macro_is_reported() {
        let source = "{% macro m() %}{{ raise_exception('no ' ~ 7) }}{% endmacro %}{{ m() }}";
        assert_eq!(render(source), Err(ChatError::Refused("no 7".into())));
    }
}
