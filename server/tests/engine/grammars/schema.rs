//! A simple check of values against the part of JSON Schema that the tests use. It shares no code with the server.

use regex::Regex;
use serde_json::Value;

/// Returns whether `schema`, which is a part of `root`, allows `value`.
pub(crate) fn allows(root: &Value, schema: &Value, value: &Value) -> bool {
    let Value::Object(fields) = schema else { return schema == &Value::Bool(true) };
    fields.iter().all(|(keyword, wanted)| holds(root, schema, (keyword, wanted), value))
}

fn holds(root: &Value, schema: &Value, (keyword, wanted): (&str, &Value), value: &Value) -> bool {
    let size = |wanted: &Value| usize::try_from(wanted.as_u64().unwrap()).unwrap();
    let (text, items, fields) = (value.as_str(), value.as_array(), value.as_object());
    match keyword {
        "type" => match wanted {
            Value::Array(kinds) => kinds.iter().any(|kind| is(kind.as_str().unwrap(), value)),
            kind => is(kind.as_str().unwrap(), value),
        },
        "enum" => wanted.as_array().unwrap().contains(value),
        "const" => wanted == value,
        "anyOf" => wanted.as_array().unwrap().iter().any(|schema| allows(root, schema, value)),
        "$ref" => {
            let place = wanted.as_str().unwrap().strip_prefix('#').unwrap();
            allows(root, root.pointer(place).unwrap(), value)
        }
        "minLength" => text.is_none_or(|text| text.chars().count() >= size(wanted)),
        "maxLength" => text.is_none_or(|text| text.chars().count() <= size(wanted)),
        "pattern" => text.is_none_or(|text| Regex::new(wanted.as_str().unwrap()).unwrap().is_match(text)),
        "minimum" => value.as_f64().is_none_or(|number| number >= wanted.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|number| number <= wanted.as_f64().unwrap()),
        "minItems" => items.is_none_or(|items| items.len() >= size(wanted)),
        "maxItems" => items.is_none_or(|items| items.len() <= size(wanted)),
        "items" => items.is_none_or(|items| items.iter().all(|item| allows(root, wanted, item))),
        "required" => fields.is_none_or(|fields| {
            wanted.as_array().unwrap().iter().all(|name| fields.contains_key(name.as_str().unwrap()))
        }),
        "properties" => fields.is_none_or(|fields| {
            let wanted = wanted.as_object().unwrap();
            wanted.iter().all(|(name, schema)| fields.get(name).is_none_or(|value| allows(root, schema, value)))
        }),
        "additionalProperties" => fields.is_none_or(|fields| {
            let known = |name: &String| schema["properties"].get(name).is_some();
            fields.iter().all(|(name, value)| known(name) || allows(root, wanted, value))
        }),
        "$defs" | "title" | "description" => true,
        other => panic!("{other} is not checked"),
    }
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("{other} is no type"),
    }
}
