//! Schemas that cannot be derived: alternatives, maps with rules for their keys, and those with limits of this server;
//! and the functions by which fields refer to them (`schema_with`).

use serde_json::{Value, json};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, SchemaType, Type};
use utoipa::openapi::{Object, Ref, Schema};

/// The limits of this server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds<'a> {
    pub(super) model: &'a str,
    pub(super) vocab_size: usize,
    pub(super) max_tokens: usize,
    pub(super) max_prompts: usize,
    pub(super) max_prompt_tokens: usize,
}

/// A reference to one of the fragments, or null.
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

pub(in crate::api) fn some_token_ids() -> Schema {
    or_null("SomeTokenIds")
}

pub(in crate::api) fn response_format() -> Schema {
    or_null("ResponseFormat")
}

pub(in crate::api) fn text_format() -> Schema {
    or_null("TextFormat")
}

pub(in crate::api) fn tools() -> Schema {
    or_null("Tools")
}

pub(in crate::api) fn tool_choice() -> Schema {
    or_null("ChatToolChoice")
}

pub(in crate::api) fn system() -> Schema {
    or_null("DialectContent")
}

pub(in crate::api) fn llama_prompt() -> Ref {
    Ref::from_schema_name("LlamaPrompt")
}

pub(in crate::api) fn llama_tokens() -> Schema {
    or_null("LlamaTokens")
}

pub(in crate::api) fn llama_biases() -> Schema {
    or_null("LlamaBiases")
}

pub(in crate::api) fn dialect_messages() -> Ref {
    Ref::from_schema_name("DialectMessages")
}

pub(in crate::api) fn some_messages() -> Ref {
    Ref::from_schema_name("Messages")
}

pub(in crate::api) fn some_ids() -> Ref {
    Ref::from_schema_name("SomeTokenIds")
}

/// The `stop_reason` of a text.
pub(in crate::api) fn stop_reason() -> Object {
    let types = SchemaType::from_iter([Type::String, Type::Integer, Type::Null]);
    let about = "The stop string or the token of `stop_token_ids` that ended the text; otherwise null.";
    ObjectBuilder::new().schema_type(types).description(Some(about)).build()
}

/// Any value; the server checks it.
pub(in crate::api) fn anything() -> Object {
    ObjectBuilder::new().schema_type(SchemaType::AnyValue).build()
}

/// Always null.
pub(in crate::api) fn nothing() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// A switch that must be off.
pub(in crate::api) fn never() -> Object {
    let types = SchemaType::from_iter([Type::Boolean, Type::Null]);
    ObjectBuilder::new().schema_type(types).enum_values(Some([Value::Bool(false), Value::Null])).build()
}

/// Null, or reasoning that is off.
pub(in crate::api) fn no_reasoning() -> Schema {
    let effort = ObjectBuilder::new().enum_values(Some([Value::Null, "none".into()])).build();
    let object =
        ObjectBuilder::new().property("effort", effort).additional_properties(Some(Schema::from(nothing()))).build();
    OneOfBuilder::new().item(nothing()).item(object).build().into()
}

/// The fragments by name.
#[expect(clippy::too_many_lines, reason = "a table of independent schemas")]
pub(super) fn fragments(bounds: Bounds<'_>) -> [(&'static str, Value); 22] {
    let word = json!({"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"});
    let text_part = json!({
        "type": "object", "required": ["type", "text"],
        "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    });
    let content = json!({
        "description": "A string, or text parts.",
        "oneOf": [{"type": "string"}, {"type": "array", "items": text_part}],
    });
    let block = json!({
        "type": "object", "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    });
    let dialect_content = json!({
        "description": "A string, or blocks of text, tool calls and tool results.",
        "oneOf": [{"type": "string"}, {"type": "array", "items": block}],
    });
    let message = json!({
        "description": "One message. The checkpoint's chat template decides which roles exist.",
        "type": "object", "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/DialectContent"}]},
            "name": {"description": "Tells participants of the same role apart.", "type": ["string", "null"]},
            "tool_calls": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/MessageCalls"}]},
            "tool_call_id": {"description": "The id of the call that this message answers.", "type": ["string", "null"]},
        },
        "anyOf": [
            {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
            {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
        ],
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
    let piece = json!({"oneOf": [{"type": "string"}, {"$ref": "#/components/schemas/TokenId"}]});
    let pieces = json!({"type": "array", "minItems": 1, "items": piece});
    let bias = json!({"oneOf": [{"const": false}, {"type": "number", "minimum": -100, "maximum": 100}]});
    let prompts =
        |items: Value| json!({"type": "array", "minItems": 1, "maxItems": bounds.max_prompts, "items": items});
    [
        ("TokenId", json!({"type": "integer", "minimum": 0, "maximum": bounds.vocab_size - 1})),
        (
            "TokenIds",
            json!({
                "description": "Token ids of the model's tokenizer.",
                "type": "array", "minItems": 1, "maxItems": bounds.max_prompt_tokens,
                "items": {"$ref": "#/components/schemas/TokenId"},
            }),
        ),
        (
            "SomeTokenIds",
            json!({
                "description": "Token ids.",
                "type": "array", "items": {"$ref": "#/components/schemas/TokenId"},
            }),
        ),
        (
            "ResponseFormat",
            json!({
                "description": "The format of the answer: plain text, any JSON object, or JSON with a schema.",
                "oneOf": [
                    {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
                    {"type": "object", "required": ["type"], "properties": {
                        "type": {"const": "json_object"}, "schema": {"type": ["object", "null"]},
                    }},
                    {"type": "object", "required": ["type", "json_schema"], "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {"type": "object", "required": ["name", "schema"], "properties": {
                            "name": word, "schema": {"type": "object"},
                        }},
                    }},
                ],
            }),
        ),
        (
            "Tools",
            json!({
                "description": "Functions that the answer may call.",
                "type": "array", "maxItems": 128, "items": {
                    "type": "object", "required": ["type", "function"], "properties": {
                        "type": {"const": "function"},
                        "function": {"type": "object", "required": ["name"], "properties": {
                            "name": word,
                            "description": {"type": ["string", "null"]},
                            "parameters": {"type": ["object", "null"]},
                            "strict": {"type": ["boolean", "null"]},
                        }},
                    },
                },
            }),
        ),
        (
            "ChatToolChoice",
            json!({
                "description": "Whether and which function to call. Default: `auto` if there are tools.",
                "oneOf": [
                    {"enum": ["none", "auto", "required"]},
                    {"type": "object", "required": ["type", "function"], "properties": {
                        "type": {"const": "function"},
                        "function": {"type": "object", "required": ["name"], "properties": {"name": word}},
                    }},
                ],
            }),
        ),
        (
            "MessageCalls",
            json!({
                "description": "Calls of an earlier answer.",
                "type": "array", "items": {
                    "type": "object", "required": ["function"], "properties": {
                        "id": {"type": ["string", "null"]},
                        "type": {"enum": ["function", null]},
                        "function": {"type": "object", "required": ["name", "arguments"], "properties": {
                            "name": {"type": "string"}, "arguments": {"type": "string"},
                        }},
                    },
                },
            }),
        ),
        (
            "Seed",
            json!({
                "description": "The same seed and prompt give the same text. Default: random.",
                "type": "integer", "minimum": i64::MIN, "maximum": u64::MAX,
            }),
        ),
        (
            "Metadata",
            json!({
                "description": "The client's own notes.",
                "type": "object", "maxProperties": 16, "propertyNames": {"minLength": 1, "maxLength": 64},
                "additionalProperties": {"type": "string", "maxLength": 512},
            }),
        ),
        (
            "MaxTokens",
            json!({
                "description": "Maximum tokens to generate.",
                "type": "integer", "minimum": 1, "maximum": bounds.max_tokens,
            }),
        ),
        (
            "Prompt",
            json!({
                "description": "A string, token ids, or a list of either. It may be absent with `session` or `state`: then \
                                the conversation continues without new text. An encoder-decoder translates it.",
                "oneOf": [{"type": "string"}, prompts(json!({"type": "string"})), ids, prompts(ids.clone())],
            }),
        ),
        (
            "Stop",
            json!({
                "description": "Up to 16 strings of up to 1,024 bytes that end the text; they are not part of it.",
                "oneOf": [
                    {"type": "string", "minLength": 1, "maxLength": 1024},
                    {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
                ],
            }),
        ),
        (
            "LogitBias",
            json!({
                "description": "Values added to the logits, by token id.",
                "type": "object", "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }),
        ),
        ("Content", content),
        ("DialectContent", dialect_content),
        ("Message", message),
        (
            "Messages",
            json!({
                "description": "The conversation; only the new messages with `session` or `state`.",
                "type": "array", "minItems": 1, "maxItems": 10_000, "items": {"$ref": "#/components/schemas/Message"},
            }),
        ),
        (
            "LlamaPrompt",
            json!({
                "description": "A string, or a list: strings only are several prompts, a list with token ids is one.",
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "maxItems": bounds.max_prompts, "items": {"type": "string"}},
                    pieces,
                    {"type": "array", "minItems": 1, "maxItems": bounds.max_prompts, "items": pieces},
                ],
            }),
        ),
        (
            "LlamaTokens",
            json!({
                "description": "Maximum tokens to generate; -1 for the server's limit.",
                "oneOf": [{"const": -1}, {"$ref": "#/components/schemas/MaxTokens"}],
            }),
        ),
        (
            "LlamaBiases",
            json!({
                "description": "Values added to the logits: pairs of a token id or string and a number, or an object of \
                                them; `false` bans the token.",
                "oneOf": [
                    {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [
                        {"oneOf": [{"type": "string"}, {"$ref": "#/components/schemas/TokenId"}]}, bias,
                    ]}},
                    {"type": "object", "additionalProperties": bias},
                ],
            }),
        ),
        (
            "DialectMessages",
            json!({
                "description": "The conversation; if the last message is the assistant's, the answer continues it.",
                "type": "array", "minItems": 1, "maxItems": 10_000, "items": {
                    "type": "object", "required": ["role", "content"], "properties": {
                        "role": {"enum": ["user", "assistant"]}, "content": {"$ref": "#/components/schemas/Content"},
                    },
                },
            }),
        ),
        (
            "Input",
            json!({
                "description": "The input; it may be absent to continue a response that was cut off.",
                "oneOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": item}],
            }),
        ),
    ]
}
