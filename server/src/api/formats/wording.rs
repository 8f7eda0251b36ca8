//! Explains why a body cannot be parsed, in terms of JSON: serde's messages name Rust types, which clients do not know.

use serde_json::error::Category;

/// Fields whose minimum is 1.
const FROM_ONE: [&str; 6] = ["n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "ttl_seconds"];

/// The longest quoted value or name, in characters.
const MAX_QUOTED: usize = 100;

/// Returns a message that says what is wrong with the value at `place`.
pub(in crate::api) fn complaint(place: &str, error: &serde_json::Error) -> String {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    match error.classify() {
        Category::Data => data_complaint(place, message.strip_suffix(&position).unwrap_or(&message)),
        Category::Eof => format!("{place} must be valid JSON, but the body ends too early,{position}"),
        Category::Syntax | Category::Io => format!("{place} must be valid JSON: {message}"),
    }
}

/// Like [`complaint`], for the message of an error from serde.
pub(in crate::api) fn data_complaint(place: &str, message: &str) -> String {
    // Splits the message after `start` into a name and what follows it.
    let named = |start: &str| message.strip_prefix(start)?.split_once('`');
    if let Some((name, _)) = named("missing field `") {
        let object = if place == "the body" { String::new() } else { format!("{place}.") };
        return format!("{object}{name} must be given");
    }
    if let Some((name, _)) = named("duplicate field `") {
        return format!("{name} must be given once");
    }
    if let Some(rest) = message.strip_prefix("unknown field `") {
        let (name, known) = rest.rsplit_once("`, expected ").unwrap_or((rest, "none"));
        return format!("{} is unknown here; known: {}", quoted(name), list(known));
    }
    if let Some(rest) = message.strip_prefix("unknown variant `") {
        let (found, known) = rest.rsplit_once("`, expected ").unwrap_or((rest, "none"));
        return format!("{place} must be {}, found {:?}", list(known).replace("one of", "one of:"), quoted(found));
    }
    let digits = ["invalid digit found in string", "number too "];
    if digits.iter().any(|start| message.starts_with(start)) || message == "cannot parse integer from empty string" {
        return format!("{place} must be {}", whole(place, ""));
    }
    if let Some(expected) = message.strip_prefix("expected ") {
        return format!("{place} must be {expected}");
    }
    let Some((found, expected)) = message.rsplit_once(", expected ") else {
        return format!("{place} has a value of the wrong type");
    };
    format!("{place} must be {}, found {}", expected_value(place, expected), found_value(found))
}

fn quoted(text: &str) -> String {
    text.chars().take(MAX_QUOTED).collect()
}

/// Returns a list of names without serde's backticks.
fn list(names: &str) -> String {
    names.replace('`', "")
}

fn whole(place: &str, most: &str) -> String {
    let least = u8::from(FROM_ONE.contains(&place));
    if most.is_empty() {
        format!("a whole number, at least {least}")
    } else {
        format!("a whole number from {least} to {most}")
    }
}

fn expected_value(place: &str, expected: &str) -> String {
    let value = match expected {
        "u64" | "usize" => return whole(place, ""),
        "u32" => return whole(place, "4294967295"),
        "i32" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        "unit" => "null",
        "string or map" | "variant identifier" => "a string",
        expected if expected.starts_with("enum ") => "a string",
        expected if expected.starts_with("struct ") => "an object",
        expected if expected.starts_with("a tuple") || expected.starts_with("tuple") => "an array of another length",
        expected => expected,
    };
    value.to_owned()
}

fn found_value(found: &str) -> String {
    let (_, found) = found.split_once(": ").unwrap_or(("", found));
    match found {
        "sequence" => "an array".into(),
        "map" => "an object".into(),
        "unit value" => "null".into(),
        found => {
            let kinds = ["string ", "integer ", "floating point ", "boolean ", "character ", "invalid length "];
            let value = kinds.iter().find_map(|kind| found.strip_prefix(kind)).unwrap_or(found);
            quoted(value.trim_matches('`'))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use serde::de::DeserializeOwned;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Word {
        Yes,
        No,
        Other,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Pair {
        a: (u32, i64),
    }

    fn complain<T: DeserializeOwned>(place: &str, text: &str) -> String {
        complaint(place, &serde_json::from_str::<T>(text).err().expect("it is wrong"))
    }

    #[test]
    fn no_type_of_rust_is_named() {
        for (found, expected) in [
            (complain::<u64>("n", "-1"), "n must be a whole number, at least 1, found -1"),
            (complain::<u64>("min_tokens", "1.5"), "min_tokens must be a whole number, at least 0, found 1.5"),
            (
                complain::<u64>("n", "\"16, expected u64\""),
                "n must be a whole number, at least 1, found \"16, expected u64\"",
            ),
            (
                complain::<u32>("ids[0]", "4294967296"),
                "ids[0] must be a whole number from 0 to 4294967295, found 4294967296",
            ),
            (complain::<i64>("k", "[]"), "k must be a whole number, found an array"),
            (complain::<f64>("t", "true"), "t must be a number, found true"),
            (complain::<bool>("b", "{}"), "b must be true or false, found an object"),
            (complain::<String>("s", "null"), "s must be a string, found null"),
            (complain::<Vec<u8>>("v", "1"), "v must be an array, found 1"),
            (complain::<Pair>("p", "1"), "p must be an object, found 1"),
            (complain::<Pair>("p", "{}"), "p.a must be given"),
            (complain::<Pair>("the body", "{}"), "a must be given"),
            (complain::<Pair>("p", "{\"a\": [1, 2], \"a\": [1, 2]}"), "a must be given once"),
            (complain::<Pair>("p", "{\"c\": 1}"), "c is unknown here; known: a"),
            (complain::<Pair>("p", "[[1]]"), "p must be an array of another length, found 1"),
            (complain::<Word>("w", "\"maybe\""), "w must be one of: yes, no, other, found \"maybe\""),
        ] {
            assert_eq!(found, expected);
        }
        let mistaken = complain::<bool>("stream", "\"digit found in string\"");
        assert_eq!(mistaken, "stream must be true or false, found \"digit found in string\"");
        let parsed = |text: &str| data_complaint("limit", &text.parse::<u32>().expect_err("no number").to_string());
        for text in ["x", "-1", "", "4294967296"] {
            assert_eq!(parsed(text), "limit must be a whole number, at least 0");
        }
        let cut = complain::<Pair>("the body", "{\"a\"");
        assert_eq!(cut, "the body must be valid JSON, but the body ends too early, at line 1 column 4");
        let wrong = complain::<Pair>("the body", "{a}");
        assert_eq!(wrong, "the body must be valid JSON: key must be a string at line 1 column 2");
    }
}
