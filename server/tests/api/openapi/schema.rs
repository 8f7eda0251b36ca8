//! Validates values against the part of JSON Schema that the description uses. It panics on an unknown keyword, so that
//! nothing goes unchecked.

use serde_json::{Map, Value};

/// Annotations, and keywords that only the server can check.
const ANNOTATIONS: [&str; 8] =
    ["description", "format", "examples", "title", "contentEncoding", "contentMediaType", "default", "pattern"];

/// Returns where `value` violates `schema`; references point into `document`.
pub(crate) fn complaints(document: &Value, schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    Checker { document, found: &mut found }.check(schema, value, "$");
    found
}

struct Checker<'a> {
    document: &'a Value,
    found: &'a mut Vec<String>,
}

impl Checker<'_> {
    fn fits(&self, schema: &Value, value: &Value) -> bool {
        complaints(self.document, schema, value).is_empty()
    }

    fn check(&mut self, schema: &Value, value: &Value, at: &str) {
        let Value::Object(keywords) = schema else {
            assert_ne!(schema, &Value::Null, "no schema at {at}");
            self.expect(schema == &Value::Bool(true), at, "must not be there");
            return;
        };
        for (keyword, bound) in keywords {
            match keyword.as_str() {
                "$ref" => {
                    let path =
                        bound.as_str().and_then(|path| path.strip_prefix('#')).expect("a reference into the file");
                    let named = self.document.pointer(path).unwrap_or_else(|| panic!("{path} is not there"));
                    self.check(named, value, at);
                }
                "allOf" => each(bound).for_each(|schema| self.check(schema, value, at)),
                "anyOf" | "oneOf" => {
                    let fitting = each(bound).filter(|schema| self.fits(schema, value)).count();
                    let right = if keyword == "oneOf" { fitting == 1 } else { fitting > 0 };
                    self.expect(right, at, &format!("fits {fitting} of {bound}, and is {value}"));
                }
                "not" => self.expect(!self.fits(bound, value), at, &format!("must not be {bound}")),
                "if" => {
                    if self.fits(bound, value) {
                        self.check(&keywords["then"], value, at);
                    }
                }
                "then" => {}
                "enum" => self.expect(each(bound).any(|one| one == value), at, &format!("{value} is not in {bound}")),
                "const" => self.expect(bound == value, at, &format!("{value} is not {bound}")),
                "type" => {
                    let right = match bound {
                        Value::Array(kinds) => kinds.iter().any(|kind| is(kind, value)),
                        kind => is(kind, value),
                    };
                    self.expect(right, at, &format!("{value} is not of type {bound}"));
                }
                keyword if ANNOTATIONS.contains(&keyword) => {}
                keyword => self.check_parts(keyword, bound, keywords, value, at),
            }
        }
    }

    /// Checks a keyword that applies to values of one type.
    fn check_parts(&mut self, keyword: &str, bound: &Value, keywords: &Map<String, Value>, value: &Value, at: &str) {
        let number = |at_least: bool, found: f64| {
            let bound = bound.as_f64().unwrap();
            if at_least { found >= bound } else { found <= bound }
        };
        let right = match (keyword, value) {
            ("properties", Value::Object(fields)) => {
                for (name, schema) in bound.as_object().unwrap() {
                    if let Some(field) = fields.get(name) {
                        self.check(schema, field, &format!("{at}.{name}"));
                    }
                }
                true
            }
            ("required", Value::Object(fields)) => each(bound).all(|name| fields.contains_key(name.as_str().unwrap())),
            ("additionalProperties", Value::Object(fields)) => {
                let known = keywords.get("properties").and_then(Value::as_object);
                for (name, field) in
                    fields.iter().filter(|(name, _)| known.is_none_or(|known| !known.contains_key(*name)))
                {
                    self.check(bound, field, &format!("{at}.{name}"));
                }
                true
            }
            ("propertyNames", Value::Object(fields)) => {
                fields.keys().for_each(|name| self.check(bound, &name.as_str().into(), at));
                true
            }
            ("maxProperties", Value::Object(fields)) => number(false, fields.len() as f64),
            ("items", Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.check(bound, item, &format!("{at}[{index}]"));
                }
                true
            }
            ("minItems", Value::Array(items)) => number(true, items.len() as f64),
            ("maxItems", Value::Array(items)) => number(false, items.len() as f64),
            ("minLength", Value::String(text)) => number(true, text.chars().count() as f64),
            ("maxLength", Value::String(text)) => number(false, text.chars().count() as f64),
            ("minimum", Value::Number(found)) => number(true, found.as_f64().unwrap()),
            ("maximum", Value::Number(found)) => number(false, found.as_f64().unwrap()),
            ("exclusiveMinimum", Value::Number(found)) => found.as_f64().unwrap() > bound.as_f64().unwrap(),
            (
                "properties"
                | "required"
                | "additionalProperties"
                | "propertyNames"
                | "maxProperties"
                | "items"
                | "minItems"
                | "maxItems"
                | "minLength"
                | "maxLength"
                | "minimum"
                | "maximum"
                | "exclusiveMinimum",
                _,
            ) => true,
            _ => panic!("the keyword {keyword} at {at} is unknown here"),
        };
        self.expect(right, at, &format!("{value} against {keyword} {bound}"));
    }

    fn expect(&mut self, right: bool, at: &str, complaint: &str) {
        if !right {
            self.found.push(format!("{at}: {complaint}"));
        }
    }
}

fn each(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().expect("a list of schemas or values").iter()
}

fn is(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.is_u64() || value.is_i64(),
        kind => panic!("the type {kind} is unknown"),
    }
}

#[test]
fn violations_are_found() {
    let document = serde_json::json!({"a": {"type": "object", "required": ["x"], "additionalProperties": false,
        "properties": {"x": {"oneOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]}}}});
    let fits = |value| complaints(&document, &serde_json::json!({"$ref": "#/a"}), &value).is_empty();
    for right in [serde_json::json!({"x": null}), serde_json::json!({"x": 1})] {
        assert!(fits(right));
    }
    for wrong in [serde_json::json!({}), serde_json::json!({"x": 0}), serde_json::json!({"x": 1, "y": 1}), 7.into()] {
        assert!(!fits(wrong));
    }
}
