//! What a grammar must keep to before a compiler looks at it: the compiler's own recursion has no bound.

mod lark;

use serde_json::Value;

use super::{GrammarError, GrammarSpec, MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH};

/// Longest regular expression, also as a pattern in a schema: what it takes to compile one grows with its square.
const MAX_REGEX_BYTES: usize = 16 << 10;

/// Longest grammar in Lark, for the same reason.
const MAX_LARK_BYTES: usize = 64 << 10;

/// The largest number that others may have to be multiples of, without its decimal point: there is a state for each
/// remainder. All such numbers of a schema have to be multiples of each other at once in the worst case.
const MAX_MULTIPLE: u64 = 1000;

/// Fields of a schema that hold values, not schemas.
const VALUES: [&str; 4] = ["const", "enum", "default", "examples"];

/// Fields of a schema that hold schemas by names, which the client chooses and which are no keywords.
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// What a part of a schema is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A schema, or several.
    Schema,
    /// Schemas by name.
    Named,
    /// A value, in which nothing is a keyword.
    Value,
}

impl Place {
    /// What is under `key` in such a part.
    fn under(self, key: &str) -> Self {
        match self {
            Self::Schema if VALUES.contains(&key) => Self::Value,
            Self::Schema if NAMED.contains(&key) => Self::Named,
            Self::Schema | Self::Named => Self::Schema,
            Self::Value => Self::Value,
        }
    }
}

pub(super) fn check(spec: &GrammarSpec) -> Result<(), GrammarError> {
    match spec {
        GrammarSpec::JsonObject => Ok(()),
        GrammarSpec::JsonSchema(schema) => {
            within(schema.to_string().len(), MAX_GRAMMAR_BYTES)?;
            check_schema(schema)
        }
        GrammarSpec::Regex(regex) => {
            within(regex.len(), MAX_REGEX_BYTES)?;
            check_regex(regex)
        }
        GrammarSpec::Lark(lark) => {
            within(lark.len(), MAX_LARK_BYTES)?;
            lark::check(lark)
        }
        GrammarSpec::Choice(texts) => {
            if texts.is_empty() || texts.len() > MAX_CHOICES || texts.iter().any(String::is_empty) {
                return Err(GrammarError::Choices);
            }
            within(texts.iter().map(String::len).sum(), MAX_GRAMMAR_BYTES)
        }
        GrammarSpec::Calls(calls) => {
            let bytes = calls.tools.iter().map(|tool| tool.name.len() + tool.arguments.to_string().len()).sum();
            within(bytes, MAX_GRAMMAR_BYTES)?;
            calls.tools.iter().try_for_each(|tool| check_schema(&tool.arguments))
        }
    }
}

fn within(bytes: usize, most: usize) -> Result<(), GrammarError> {
    if bytes > most { Err(GrammarError::Long { most, bytes }) } else { Ok(()) }
}

fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    if !(schema.is_object() || schema.is_boolean()) {
        return Err(GrammarError::Wrong("a JSON schema is an object or a boolean".into()));
    }
    // The compiler's own options, which can make it leave out what it does not support.
    if schema.get("x-guidance").is_some() {
        return Err(GrammarError::Has("x-guidance".into()));
    }
    check_value(schema, 0, Place::Schema, &mut 1)
}

/// Recursive, but no deeper than the bound. `multiple` is what numbers have to be multiples of so far.
fn check_value(value: &Value, depth: usize, place: Place, multiple: &mut u64) -> Result<(), GrammarError> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_value(item, deeper(depth)?, place, multiple)),
        Value::Object(fields) => fields.iter().try_for_each(|(key, value)| {
            if place == Place::Schema {
                check_keyword(key, value, multiple)?;
            }
            check_value(value, deeper(depth)?, place.under(key), multiple)
        }),
        _ => Ok(()),
    }
}

/// Whether a reference is to a part that is checked as a schema: the compiler takes any part for one that it is led to.
fn is_to_schema(pointer: &str) -> bool {
    let place = pointer.split('/').skip(1).fold(Place::Schema, |place, key| place.under(&unescaped(key)));
    place == Place::Schema
}

/// A part of a reference as the compiler reads it, as far as keywords can be in it.
fn unescaped(key: &str) -> String {
    let mut parts = key.split('%');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(u8::is_ascii) {
            Some(byte) => text.extend([char::from(byte)].into_iter().chain(part[2..].chars())),
            None => text.extend(['%'].into_iter().chain(part.chars())),
        }
    }
    text
}

fn check_keyword(keyword: &str, value: &Value, multiple: &mut u64) -> Result<(), GrammarError> {
    match (keyword, value) {
        ("$ref", Value::String(uri)) => {
            let (document, pointer) = uri.split_once('#').unwrap_or((uri, ""));
            let what = match (document, is_to_schema(pointer)) {
                ("", true) if !uri.is_empty() => return Ok(()),
                ("", false) => "what is no schema",
                _ => "another document",
            };
            let uri: String = uri.chars().take(100).collect();
            Err(GrammarError::Has(format!("a $ref to {what}, found {uri:?}")))
        }
        ("pattern", Value::String(regex)) => {
            within(regex.len(), MAX_REGEX_BYTES)?;
            check_depth_of_regex(regex)
        }
        ("patternProperties", Value::Object(fields)) => fields.keys().try_for_each(|regex| {
            within(regex.len(), MAX_REGEX_BYTES)?;
            check_depth_of_regex(regex)
        }),
        ("multipleOf", Value::Number(number)) => {
            let digits = digits(number.as_f64().unwrap_or_default());
            *multiple = digits.and_then(|digits| lcm(*multiple, digits)).ok_or_else(|| {
                let reason = format!("multipleOf but of 4 decimal places and of {MAX_MULTIPLE} together without them");
                GrammarError::Has(reason)
            })?;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// A positive number of at most four decimal places, without its decimal point; none where it is another or too large.
fn digits(number: f64) -> Option<u64> {
    let fits = |number: f64| (number.fract() == 0.0 && number >= 1.0).then_some(number as u64);
    if !(number > 0.0 && number <= 1e9) {
        return None;
    }
    let scaled = (0..=4).find_map(|places| fits((number * 10_f64.powi(places) * 1e3).round() / 1e3))?;
    Some(scaled).filter(|scaled| *scaled <= MAX_MULTIPLE)
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    Some(a / x * b).filter(|multiple| *multiple <= MAX_MULTIPLE)
}

fn check_regex(regex: &str) -> Result<(), GrammarError> {
    if regex.is_empty() {
        return Err(GrammarError::Wrong("an empty regular expression matches only the empty text".into()));
    }
    // The compiler would take it for one without the last backslash.
    if regex.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1 {
        return Err(GrammarError::Wrong("a regular expression cannot end with a backslash".into()));
    }
    check_depth_of_regex(regex)
}

/// Groups that are open at once; a parenthesis in a class counts too, which makes this an upper bound.
fn check_depth_of_regex(regex: &str) -> Result<(), GrammarError> {
    let (mut depth, mut escaped) = (0, false);
    for byte in regex.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' => depth = deeper(depth)?,
            b')' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    Ok(())
}

fn deeper(depth: usize) -> Result<usize, GrammarError> {
    if depth < MAX_GRAMMAR_DEPTH { Ok(depth + 1) } else { Err(GrammarError::Deep) }
}
