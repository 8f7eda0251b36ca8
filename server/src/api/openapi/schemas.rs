//! Schemas that are written as JSON because they cannot be derived: alternatives with bounds, maps with rules for their
//! keys, and limits of this server.

use serde_json::Value;
use utoipa::PartialSchema;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{Object, RefOr, Schema};

/// Gives types a schema that is written as JSON. A `maximum` or `maxItems` may be the name of a limit of this server,
/// which `finish.rs` replaces with the number.
macro_rules! json_schemas {
    ($($type:ty: $name:literal = $schema:tt;)+) => {$(
        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                $crate::api::openapi::schemas::json(serde_json::json!($schema))
            }
        }

        impl utoipa::ToSchema for $type {
            fn name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }
        }
    )+};
}
pub(in crate::api) use json_schemas;

/// The key under which a schema in JSON passes through utoipa.
pub(super) const JSON: &str = "x-json";

pub(in crate::api) fn json(schema: Value) -> RefOr<Schema> {
    ObjectBuilder::new().extensions(Some(ExtensionsBuilder::new().add(JSON, schema).build())).build().into()
}

/// One token id.
pub(in crate::api) struct TokenId;

/// The token ids of a prompt.
pub(in crate::api) struct TokenIds;

/// A number of tokens to generate.
pub(in crate::api) struct MaxTokens;

json_schemas! {
    TokenId: "TokenId" = {"type": "integer", "minimum": 0, "maximum": "token_id"};
    TokenIds: "TokenIds" = {
        "description": "Token ids of the model's tokenizer.",
        "type": "array", "minItems": 1, "maxItems": "prompt_tokens",
        "items": {"type": "integer", "minimum": 0, "maximum": "token_id"},
    };
    MaxTokens: "MaxTokens" = {"type": "integer", "minimum": 1, "maximum": "max_tokens"};
}

/// Returns the schema of a body with only the fields in `names`.
pub(in crate::api) fn only<T: PartialSchema>(names: &[&str]) -> RefOr<Schema> {
    let mut schema = T::schema();
    if let RefOr::T(Schema::Object(object)) = &mut schema {
        object.properties.retain(|name, _| names.contains(&name.as_str()));
        object.required.retain(|name| names.contains(&name.as_str()));
    }
    schema
}

/// Returns the schema of a field that is always null.
pub(in crate::api) fn nothing() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// Returns the schema of a switch that must be off.
pub(in crate::api) fn never() -> Object {
    let types = SchemaType::from_iter([Type::Boolean, Type::Null]);
    ObjectBuilder::new().schema_type(types).enum_values(Some([Value::Bool(false), Value::Null])).build()
}
