//! Completes the derived schemas: adds this server's limits, adds conditions between fields, and states that responses
//! have no undescribed fields.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::schemas::JSON;

/// A limit of this server: the name that schemas use for it, and its value.
type Limit = (&'static str, usize);

/// Returns the conditions between the fields of types.
fn conditions() -> [(&'static str, Value); 11] {
    let given = |name: &str| json!({"required": [name], "properties": {name: {"not": {"type": "null"}}}});
    let streamed = json!({
        "if": {"required": ["stream_options"], "properties": {"stream_options": {"type": "object"}}},
        "then": {"required": ["stream"], "properties": {"stream": {"const": true}}},
    });
    let turn = |name: &str| json!([streamed, {"anyOf": [given(name), given("session"), given("state")]}]);
    let response = json!([streamed, {"anyOf": [given("input"), given("previous_response_id")]}]);
    let calls = json!({"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}});
    let texts = ["text", "tokens", "messages"];
    let starts = ["text", "tokens", "messages", "version", "snapshot"];
    let absent = |names: &[&str]| {
        let nulls: Map<String, Value> = names.iter().map(|name| ((*name).into(), json!({"type": "null"}))).collect();
        json!({"properties": nulls})
    };
    let append = json!([{"oneOf": texts.map(given)}]);
    // This avoids `oneOf` with "none of them" as an alternative, with which request generators search for minutes.
    let excludes = |name: &str, others: &[&str]| json!({"if": given(name), "then": absent(others)});
    let mut create: Vec<Value> = (1..starts.len()).map(|next| excludes(starts[next - 1], &starts[next..])).collect();
    create.push(excludes("seed", &["version", "snapshot"]));
    let words = ["content", "prompt", "messages"];
    let tokens = json!([{"oneOf": words.map(given)}]);
    let of = |kind: &str| json!({"required": ["type"], "properties": {"type": {"const": kind}}});
    let message = json!({"properties": {"type": {"enum": ["message", null]}}});
    let item = json!([{"anyOf": [
        {"allOf": [message, given("role"), given("content")]},
        {"allOf": [of("function_call"), given("call_id"), given("name")]},
        {"allOf": [of("function_call_output"), given("call_id"), given("output")]},
    ]}]);
    [
        ("CompletionRequest", turn("prompt")),
        ("ChatRequest", turn("messages")),
        ("Message", json!([{"anyOf": [given("content"), calls]}])),
        ("ResponseRequest", response),
        ("Input", json!([{"minItems": 1}])),
        ("InputItem", item),
        ("TokenizeRequest", tokens),
        ("AppendRequest", append),
        ("CreateRequest", create.into()),
        ("Completion", json!([given("usage")])),
        ("Chat", json!([given("usage")])),
    ]
}

/// Half of the smallest positive `f32`: numbers that are not above it are rounded to 0.
const SMALLEST: f64 = 7.006_492_321_624_085e-46;

/// Fills in schemas that are written as JSON, limits in place of their names, and the model's name in place of `MODEL`.
/// Also replaces the bound 0 of positive numbers with [`SMALLEST`], up to which the server rounds to 0.
fn fill_in(value: &mut Value, model: &str, limits: &[Limit]) {
    if let Some(schema) = value.get_mut(JSON) {
        *value = schema.take();
    }
    match value {
        Value::String(text) if text == "MODEL" => model.clone_into(text),
        Value::Array(items) => items.iter_mut().for_each(|item| fill_in(item, model, limits)),
        Value::Object(fields) => {
            for (key, field) in fields {
                match (key.as_str(), &*field) {
                    ("exclusiveMinimum", zero) if zero.as_f64() == Some(0.0) => *field = SMALLEST.into(),
                    ("maximum" | "maxItems", Value::String(name)) => {
                        *field = limits.iter().find(|(limit, _)| limit == name).map(|(_, limit)| *limit).into();
                    }
                    _ => fill_in(field, model, limits),
                }
            }
        }
        _ => {}
    }
}

/// Completes the document.
pub(super) fn finish<const N: usize>(document: &mut Value, model: &str, limits: [Limit; N]) {
    fill_in(document, model, &limits);
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut) else { return };
    *schemas = schemas.iter().map(|(name, schema)| (name.clone(), merged(schema, schemas))).collect();
    for (name, all) in conditions() {
        schemas[name]["allOf"] = all;
    }
    let requests = reached(document, "requestBody");
    let responses = reached(document, "responses");
    let Some(schemas) = document.pointer_mut("/components/schemas").and_then(Value::as_object_mut) else { return };
    schemas.retain(|name, _| requests.contains(name) || responses.contains(name));
    for (_, schema) in schemas.iter_mut().filter(|(name, _)| !requests.contains(*name)) {
        close(schema);
    }
}

/// States that objects with known fields have no other fields.
fn close(schema: &mut Value) {
    if schema.get("properties").is_some() {
        schema["additionalProperties"] = Value::Bool(false);
    }
    schema.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten().for_each(close);
}

/// Merges a schema with flattened fields (`allOf`) into one object, or one object for each alternative of a flattened
/// enum.
fn merged(schema: &Value, schemas: &Map<String, Value>) -> Value {
    let Some(parts) = schema["allOf"].as_array() else { return schema.clone() };
    let mut wholes = vec![json!({"type": "object", "properties": {}, "required": []})];
    for part in parts {
        let named = part["$ref"].as_str().and_then(|path| schemas.get(path.rsplit('/').next()?));
        let part = merged(named.unwrap_or(part), schemas);
        let options = part["oneOf"].as_array().map_or_else(|| vec![&part], |options| options.iter().collect());
        let extended = |whole: &Value| options.iter().map(|option| extended(whole, &merged(option, schemas))).collect();
        wholes = wholes.iter().flat_map::<Vec<Value>, _>(extended).collect();
    }
    let mut whole = if let [whole] = wholes.as_slice() { whole.clone() } else { json!({"oneOf": wholes}) };
    if !schema["description"].is_null() {
        whole["description"] = schema["description"].clone();
    }
    whole
}

/// Returns the object `whole` with the fields of `part` added.
fn extended(whole: &Value, part: &Value) -> Value {
    let mut whole = whole.clone();
    for (field, schema) in part["properties"].as_object().into_iter().flatten() {
        whole["properties"][field] = schema.clone();
    }
    let required = whole["required"].as_array().into_iter().chain(part["required"].as_array());
    whole["required"] = required.flatten().cloned().collect();
    whole
}

/// Returns the names of the schemas that the field `part` of any operation refers to, directly or through other
/// schemas.
fn reached(document: &Value, part: &str) -> BTreeSet<String> {
    let items = document["paths"].as_object().into_iter().flat_map(Map::values);
    let operations = items.filter_map(Value::as_object).flat_map(Map::values);
    let mut open: Vec<&Value> = operations.filter_map(|operation| operation.get(part)).collect();
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
