//! Checks the limits of JSON schemas and regular expressions.

use serde_json::Value;

use super::spec::{GrammarError, MAX_GRAMMAR_DEPTH};

/// Longest regular expression in bytes, including patterns in schemas. The cost of compiling it grows with the square
/// of its length.
pub(super) const MAX_REGEX_BYTES: usize = 16 << 10;

/// Largest least common multiple of `multipleOf` values, ignoring decimal points. The compiler has a state for each
/// remainder, and in the worst case all `multipleOf` of a schema apply at once.
const MAX_MULTIPLE: u64 = 1000;

/// Keywords whose contents are values, not schemas.
const VALUES: [&str; 4] = ["const", "enum", "default", "examples"];

/// Keywords that contain schemas under names that the client chooses; these names are not keywords.
const NAMED: [&str; 6] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];

/// The kind of part within a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// One or several schemas.
    Schema,
    /// Schemas by name.
    Named,
    /// A value, which contains no keywords.
    Value,
}

impl Part {
    /// Returns the kind of the part under `key`.
    fn child(self, key: &str) -> Self {
        match self {
            Self::Schema if VALUES.contains(&key) => Self::Value,
            Self::Schema if NAMED.contains(&key) => Self::Named,
            Self::Schema | Self::Named => Self::Schema,
            Self::Value => Self::Value,
        }
    }
}

pub(super) fn within(bytes: usize, max: usize) -> Result<(), GrammarError> {
    if bytes > max { Err(GrammarError::Long { max, bytes }) } else { Ok(()) }
}

pub(super) fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    if !(schema.is_object() || schema.is_boolean()) {
        return Err(GrammarError::Wrong("a JSON schema must be an object or a boolean".into()));
    }
    // These are the compiler's own options, which could make it ignore unsupported features.
    if schema.get("x-guidance").is_some() {
        return Err(GrammarError::Has("x-guidance".into()));
    }
    check_value(schema, 0, Part::Schema, &mut 1)
}

/// Checks a part of a schema. The depth limits recursion. `multiple` is the least common multiple of all `multipleOf`
/// so far.
fn check_value(value: &Value, depth: usize, part: Part, multiple: &mut u64) -> Result<(), GrammarError> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_value(item, deeper(depth)?, part, multiple)),
        Value::Object(fields) => fields.iter().try_for_each(|(key, value)| {
            if part == Part::Schema {
                check_keyword(key, value, multiple)?;
            }
            check_value(value, deeper(depth)?, part.child(key), multiple)
        }),
        _ => Ok(()),
    }
}

/// Whether a reference leads to a part that is checked as a schema; the compiler would accept any part as a schema.
fn is_to_schema(pointer: &str) -> bool {
    let part = pointer.split('/').skip(1).fold(Part::Schema, |part, key| part.child(&unescaped(key)));
    part == Part::Schema
}

/// Decodes a part of a reference as the compiler does, for all characters that occur in keywords.
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
                ("", false) => "something that is not a schema",
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
                let reason =
                    format!("multipleOf with more than 4 decimal places or beyond a common multiple of {MAX_MULTIPLE}");
                GrammarError::Has(reason)
            })?;
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Returns a positive number with at most four decimal places as an integer without its decimal point; `None` for other
/// numbers and for results that are too large.
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

/// Limits how many groups are open at once. Parentheses in character classes are counted too, so this is an upper
/// bound.
pub(super) fn check_depth_of_regex(regex: &str) -> Result<(), GrammarError> {
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

pub(super) fn deeper(depth: usize) -> Result<usize, GrammarError> {
    if depth < MAX_GRAMMAR_DEPTH { Ok(depth + 1) } else { Err(GrammarError::Deep) }
}
