//! Completes the derived schemas: this server's limits, conditions between fields, and that responses have no
//! undescribed fields.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::fragments::{Bounds, fragments};

/// Conditions between the fields of requests.
fn conditions() -> [(&'static str, Value); 6] {
    let given = |name: &str| json!({"required": [name], "properties": {name: {"not": {"type": "null"}}}});
    let streamed = json!({
        "if": {"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}},
        "then": {"required": ["stream"], "properties": {"stream": {"const": true}}},
    });
    let turn = |name: &str| json!([streamed, {"anyOf": [given(name), given("session"), given("state")]}]);
    let response = json!([streamed, {"anyOf": [given("input"), given("previous_response_id")]}]);
    let texts = ["text", "tokens", "messages"];
    let starts = ["text", "tokens", "messages", "version", "snapshot"];
    let absent = |names: &[&str]| {
        let nulls: Map<String, Value> = names.iter().map(|name| ((*name).into(), json!({"type": "null"}))).collect();
        json!({"properties": nulls})
    };
    let append = json!([{"oneOf": texts.map(given)}]);
    let mut one = starts.map(given).to_vec();
    one.push(absent(&starts));
    let create = json!([{"oneOf": one}, {"if": given("seed"), "then": absent(&["version", "snapshot"])}]);
    let words = ["content", "prompt", "messages"];
    let tokens = json!([{"oneOf": words.map(given)}]);
    [
        ("CompletionRequest", turn("prompt")),
        ("ChatRequest", turn("messages")),
        ("ResponseRequest", response),
        ("TokenizeRequest", tokens),
        ("AppendRequest", append),
        ("CreateRequest", create),
    ]
}

/// Half of the smallest positive f32: what is not above it is rounded to 0.
const SMALLEST: f64 = 7.006_492_321_624_085e-46;

/// Replaces the bound 0 of positive numbers by the smallest number that the server does not round to 0.
fn above_zero(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(above_zero),
        Value::Object(fields) => {
            if fields.get("exclusiveMinimum").is_some_and(|bound| bound.as_f64() == Some(0.0)) {
                fields.insert("exclusiveMinimum".to_owned(), SMALLEST.into());
            }
            fields.values_mut().for_each(above_zero);
        }
        _ => {}
    }
}

/// Completes the document.
pub(super) fn finish(document: &mut Value, bounds: Bounds<'_>) {
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut) else { return };
    merge(schemas);
    for (name, schema) in fragments(bounds) {
        schemas.insert(name.to_owned(), schema);
    }
    for (name, all) in conditions() {
        schemas[name]["allOf"] = all;
    }
    name_model(document, bounds.model);
    above_zero(document);
    let requests = reached(document, |operation| vec![operation.get("requestBody")]);
    let responses = reached(document, |operation| vec![operation.get("responses")]);
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut) else { return };
    schemas.retain(|name, _| requests.contains(name) || responses.contains(name));
    for (name, schema) in schemas.iter_mut() {
        if !requests.contains(name) && schema.get("properties").is_some() {
            schema["additionalProperties"] = Value::Bool(false);
        }
    }
}

/// Replaces `MODEL` in examples by the model's name.
fn name_model(value: &mut Value, model: &str) {
    match value {
        Value::String(text) if text == "MODEL" => model.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(|item| name_model(item, model)),
        Value::Object(fields) => fields.values_mut().for_each(|field| name_model(field, model)),
        _ => {}
    }
}

/// Merges the parts of schemas with flattened fields (`allOf`) into one object.
fn merge(schemas: &mut Map<String, Value>) {
    let merged = schemas.iter().map(|(name, schema)| (name.clone(), merged(schema, schemas))).collect();
    *schemas = merged;
}

fn merged(schema: &Value, schemas: &Map<String, Value>) -> Value {
    let Some(parts) = schema["allOf"].as_array() else { return schema.clone() };
    let mut whole = json!({"type": "object", "properties": {}, "required": []});
    if !schema["description"].is_null() {
        whole["description"] = schema["description"].clone();
    }
    for part in parts {
        let named = part["$ref"].as_str().and_then(|path| schemas.get(path.rsplit('/').next()?));
        let part = merged(named.unwrap_or(part), schemas);
        for (field, schema) in part["properties"].as_object().into_iter().flatten() {
            whole["properties"][field] = schema.clone();
        }
        let required = whole["required"].as_array().into_iter().chain(part["required"].as_array());
        whole["required"] = required.flatten().cloned().collect();
    }
    whole
}

/// The names of the schemas that a part of any operation refers to.
fn reached<'a>(document: &'a Value, from: impl Fn(&'a Value) -> Vec<Option<&'a Value>>) -> BTreeSet<String> {
    let items = document["paths"].as_object().into_iter().flat_map(Map::values);
    let operations = items.filter_map(Value::as_object).flat_map(Map::values);
    let mut open: Vec<&Value> = operations.flat_map(from).flatten().collect();
    let mut names = BTreeSet::new();
    while let Some(value) = open.pop() {
        if let Some(name) = value.get("$ref").and_then(Value::as_str).and_then(|path| path.rsplit('/').next())
            && names.insert(name.to_owned())
        {
            open.push(&document["components"]["schemas"][name]);
        }
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(fields) => open.extend(fields.values()),
            _ => {}
        }
    }
    names
}
