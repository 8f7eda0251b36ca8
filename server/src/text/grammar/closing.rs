//! Closes the objects of a schema that does not say whether they may have other properties. Otherwise a model would
//! invent properties until its answer is cut off.

use serde_json::{Map, Value};

/// The keyword that says whether an object may have other properties.
const ADDITIONAL: &str = "additionalProperties";

/// Keywords that describe parts of the value that the schema describes; each keyword describes different parts.
const PARTS: [&str; 5] = ["properties", ADDITIONAL, "items", "prefixItems", "additionalItems"];

/// Other keywords that describe the same value, or parts of it.
const SAME_VALUE: [&str; 9] =
    ["patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies"];

/// Returns `schema` with its objects closed: they have only the properties that they name, unless the schema says
/// otherwise. Objects that several schemas describe together stay open, because one schema does not know the properties
/// of another.
pub(super) fn closed(schema: Value) -> Value {
    let mut closed = schema.clone();
    match close(&mut closed, false) {
        Ok(()) => closed,
        Err(Shared) => schema,
    }
}

/// The error for a reference that is one of several descriptions of an object. The schema that it refers to must not be
/// closed, and it may refer to any schema, so none is closed.
struct Shared;

/// Closes the objects of `schema`. `shared` says whether other schemas describe the same value, because they may then
/// also describe its parts. Recursion is limited by the depth of JSON bodies.
fn close(schema: &mut Value, shared: bool) -> Result<(), Shared> {
    let fields = match schema {
        Value::Array(schemas) => return schemas.iter_mut().try_for_each(|schema| close(schema, shared)),
        Value::Object(fields) => fields,
        _ => return Ok(()),
    };
    let descriptions = |keyword: &&str| match fields.get(*keyword) {
        Some(Value::Array(all)) if *keyword == "allOf" => all.len(),
        found => usize::from(found.is_some()),
    };
    let parts =
        PARTS.iter().any(|keyword| fields.get(*keyword).is_some_and(|part| part.is_object() || part.is_array()));
    let shared = shared || usize::from(parts) + SAME_VALUE.iter().map(descriptions).sum::<usize>() > 1;
    if shared && fields.contains_key("$ref") {
        return Err(Shared);
    }
    for (keyword, part) in fields.iter_mut() {
        match (keyword.as_str(), part) {
            ("allOf" | "anyOf" | "oneOf" | "items" | "prefixItems" | "additionalItems" | ADDITIONAL, part) => {
                close(part, shared)?;
            }
            ("properties" | "patternProperties", Value::Object(named)) => {
                named.values_mut().try_for_each(|schema| close(schema, shared))?;
            }
            ("$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().try_for_each(|schema| close(schema, false))?;
            }
            _ => {}
        }
    }
    if !shared
        && names_enough(fields)
        && !fields.contains_key(ADDITIONAL)
        && !fields.contains_key("unevaluatedProperties")
    {
        fields.insert(ADDITIONAL.into(), Value::Bool(false));
    }
    Ok(())
}

/// Whether the schema names enough properties: all that it requires, and at least `minProperties` of them.
fn names_enough(fields: &Map<String, Value>) -> bool {
    let Some(named) = fields.get("properties").and_then(Value::as_object) else { return false };
    let least = fields.get("minProperties").and_then(Value::as_u64).unwrap_or(0);
    let required = fields.get("required").and_then(Value::as_array);
    let mut required = required.into_iter().flatten().filter_map(Value::as_str);
    named.len() as u64 >= least && required.all(|name| named.contains_key(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_closed_at_every_level_unless_they_say_otherwise() {
        let open = json!({"type": "object", "properties": {"a": {"type": "null"}}});
        let shut = json!({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": false});
        for place in [
            json!({"properties": {"x": open}, "additionalProperties": true}),
            json!({"items": open}),
            json!({"prefixItems": [open, {"type": "string"}]}),
            json!({"$defs": {"properties": open}, "$ref": "#/$defs/properties", "description": "d"}),
            json!({"anyOf": [open, {"type": "null"}]}),
            json!({"allOf": [open]}),
            json!({"additionalProperties": open}),
            json!({"patternProperties": {"^x": open}, "additionalProperties": false}),
        ] {
            let wanted = place.to_string().replace(&open.to_string(), &shut.to_string());
            assert_eq!(closed(place), serde_json::from_str::<Value>(&wanted).unwrap());
        }
    }

    #[test]
    fn what_closing_would_contradict_stays_open() {
        let part = |name: &str| json!({"properties": {name: {"type": "null"}}, "required": [name]});
        let reference = json!({"$ref": "#/$defs/a"});
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": true}, "additionalProperties": {"type": "string"}}),
            json!({"properties": {"a": true}, "unevaluatedProperties": true}),
            json!({"properties": {"a": true}, "required": ["a", "b"]}),
            json!({"allOf": [part("a"), part("b")]}),
            json!({"anyOf": [part("a"), part("b")], "properties": {"c": true}}),
            json!({"allOf": [reference, part("b")], "$defs": {"a": part("a")}}),
            json!({"allOf": [{"properties": {"x": part("a")}}, {"properties": {"x": part("b")}}]}),
            json!({"allOf": [{"properties": {"x": reference}}, {"properties": {"x": part("b")}}], "$defs": {"a": part("a")}}),
            json!({"allOf": [{"items": part("a")}, {"items": part("b")}]}),
            json!({"items": part("a"), "allOf": [{"items": part("b")}]}),
            json!({"allOf": [{"additionalProperties": part("a")}, {"additionalProperties": part("b")}]}),
            json!({"properties": {"x": part("a")}, "patternProperties": {"^x": part("b")}}),
            json!({"properties": {"id": true}, "required": ["id"], "minProperties": 3}),
            json!({"enum": [{"properties": {}}], "const": {"properties": {}}, "default": {"properties": {}}}),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }
}
