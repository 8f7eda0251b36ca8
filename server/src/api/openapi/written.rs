//! Schemas that are written out: alternatives, maps with rules for their keys, and what the bounds of this server are
//! part of; and how a field of a type refers to one.

use serde_json::{Value, json};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{Object, Ref, Schema};

use super::finish::Bounds;

/// A reference to one of the schemas below, or null.
fn or_null(name: &str) -> Schema {
    OneOfBuilder::new().item(nothing()).item(Ref::from_schema_name(name)).build().into()
}

pub(in crate::api) fn prompt() -> Schema {
    or_null("Prompt")
}

pub(in crate::api) fn stop() -> Schema {
    or_null("Stop")
}

pub(in crate::api) fn max_tokens() -> Schema {
    or_null("MaxTokens")
}

pub(in crate::api) fn logit_bias() -> Schema {
    or_null("LogitBias")
}

pub(in crate::api) fn seed() -> Schema {
    or_null("Seed")
}

pub(in crate::api) fn metadata() -> Schema {
    or_null("Metadata")
}

pub(in crate::api) fn token_ids() -> Schema {
    or_null("TokenIds")
}

pub(in crate::api) fn messages() -> Schema {
    or_null("Messages")
}

pub(in crate::api) fn input() -> Schema {
    or_null("Input")
}

/// What is always null.
pub(in crate::api) fn nothing() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// A switch that must not be on.
pub(super) fn never() -> Object {
    let types = SchemaType::from_iter([Type::Boolean, Type::Null]);
    ObjectBuilder::new().schema_type(types).enum_values(Some([Value::Bool(false), Value::Null])).build()
}

/// The one word that is allowed.
pub(super) fn word(word: &str) -> Object {
    ObjectBuilder::new().schema_type(Type::String).enum_values(Some([word])).build()
}

/// An object that asks for nothing.
pub(super) fn no_reasoning() -> Schema {
    let effort = ObjectBuilder::new().enum_values(Some([Value::Null, "none".into()])).build();
    let object = ObjectBuilder::new().property("effort", effort).additional_properties(Some(Schema::from(nothing()))).build();
    OneOfBuilder::new().item(nothing()).item(object).build().into()
}

/// The schemas that are written out, by name.
pub(super) fn written(bounds: Bounds) -> [(&'static str, Value); 12] {
    let text_part = json!({
        "type": "object", "required": ["type", "text"],
        "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    });
    let content = json!({
        "description": "A text, or parts of text.",
        "oneOf": [{"type": "string"}, {"type": "array", "items": text_part}],
    });
    let message = json!({
        "description": "One message. Which roles there are is up to the checkpoint's chat template.",
        "type": "object", "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"$ref": "#/components/schemas/Content"}},
    });
    let item = json!({
        "type": "object", "required": ["role", "content"],
        "properties": {
            "type": {"enum": ["message", null]},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {"$ref": "#/components/schemas/Content"},
        },
    });
    let ids = json!({"$ref": "#/components/schemas/TokenIds"});
    let prompts = |items: Value| {
        json!({"type": "array", "minItems": 1, "maxItems": bounds.max_prompts, "items": items})
    };
    [
        ("TokenId", json!({"type": "integer", "minimum": 0, "maximum": bounds.vocab_size - 1})),
        ("TokenIds", json!({
            "description": "Token ids, as the model's tokenizer has them.",
            "type": "array", "minItems": 1, "maxItems": bounds.max_prompt_tokens,
            "items": {"$ref": "#/components/schemas/TokenId"},
        })),
        ("Seed", json!({
            "description": "The same seed and prompt give the same text. Random where it is absent.",
            "type": "integer", "minimum": i64::MIN, "maximum": u64::MAX,
        })),
        ("Metadata", json!({
            "description": "What the client notes for itself.",
            "type": "object", "maxProperties": 16, "propertyNames": {"minLength": 1, "maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        })),
        ("MaxTokens", json!({
            "description": "Tokens to generate at most.",
            "type": "integer", "minimum": 1, "maximum": bounds.max_tokens,
        })),
        ("Prompt", json!({
            "description": "A text, several, token ids, or several lists of them; absent only where the conversation \
                            that `session` or `state` names goes on by itself.",
            "oneOf": [{"type": "string"}, prompts(json!({"type": "string"})), ids, prompts(ids.clone())],
        })),
        ("Stop", json!({
            "description": "Texts that end the answer, which does not have them: up to 16, each of up to 1,024 bytes.",
            "oneOf": [
                {"type": "string", "minLength": 1, "maxLength": 1024},
                {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
            ],
        })),
        ("LogitBias", json!({
            "description": "Added to the logits of tokens, by their ids.",
            "type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        })),
        ("Content", content),
        ("Message", message),
        ("Messages", json!({
            "description": "The conversation; only what is new where `session` or `state` names one.",
            "type": "array", "minItems": 1, "maxItems": 10_000, "items": {"$ref": "#/components/schemas/Message"},
        })),
        ("Input", json!({
            "description": "What is to be answered; absent only where a response that was cut off goes on.",
            "oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}],
        })),
    ]
}

