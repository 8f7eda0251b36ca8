//! What the derived schemas cannot say: the bounds of this server, alternatives and conditions, and that answers have
//! no fields but those described.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::fragments::fragments;

/// What differs from server to server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds<'a> {
    pub(super) model: &'a str,
    pub(super) vocab_size: usize,
    pub(super) max_tokens: usize,
    pub(super) max_prompts: usize,
    pub(super) max_prompt_tokens: usize,
}

/// What a request must be beside its fields.
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

/// Half of the smallest number that 32 bits hold: what is not above it counts as 0.
const NOTHING: f64 = 7.006_492_321_624_085e-46;

/// Says of what must be above 0 how much above it must be.
fn above_zero(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(above_zero),
        Value::Object(fields) => {
            if fields.get("exclusiveMinimum").is_some_and(|bound| bound.as_f64() == Some(0.0)) {
                fields.insert("exclusiveMinimum".to_owned(), NOTHING.into());
            }
            fields.values_mut().for_each(above_zero);
        }
        _ => {}
    }
}

/// Completes `document`.
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
    let wanted = reached(document, |operation| vec![operation.get("requestBody")]);
    let given = reached(document, |operation| vec![operation.get("responses")]);
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut) else { return };
    schemas.retain(|name, _| wanted.contains(name) || given.contains(name));
    for (name, schema) in schemas.iter_mut() {
        if !wanted.contains(name) && schema.get("properties").is_some() {
            schema["additionalProperties"] = Value::Bool(false);
        }
    }
}

/// Puts the model's name into the examples that need one.
fn name_model(value: &mut Value, model: &str) {
    match value {
        Value::String(text) if text == "MODEL" => model.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(|item| name_model(item, model)),
        Value::Object(fields) => fields.values_mut().for_each(|field| name_model(field, model)),
        _ => {}
    }
}

/// Makes one object of each that was put together from several.
fn merge(schemas: &mut Map<String, Value>) {
    let names: Vec<String> = schemas.keys().cloned().collect();
    for name in names {
        let Some(Value::Array(parts)) = schemas[&name].get("allOf").cloned() else { continue };
        let mut whole = schemas[&name].clone();
        if let Some(whole) = whole.as_object_mut() {
            whole.remove("allOf");
        }
        for part in parts {
            let found = part["$ref"].as_str().and_then(|path| path.rsplit('/').next());
            let part = found.map_or(part.clone(), |found| schemas[found].clone());
            whole["type"] = "object".into();
            for (field, schema) in part["properties"].as_object().into_iter().flatten() {
                whole["properties"][field] = schema.clone();
            }
            let required = whole["required"].as_array().into_iter().chain(part["required"].as_array());
            whole["required"] = required.flatten().cloned().collect();
        }
        schemas.insert(name, whole);
    }
}

/// The names of the schemas that are reached from some part of each operation.
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
