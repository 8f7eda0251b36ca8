//! Types for fields with one fixed string as their value, such as `"object": "session"`.

/// Declares a unit type for each string.
macro_rules! literals {
    ($($name:ident = $text:literal),* $(,)?) => {$(
        #[derive(Clone, Copy, Debug, Default)]
        pub(in crate::api) struct $name;

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str($text)
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                let text = utoipa::openapi::schema::Type::String;
                let literal = utoipa::openapi::ObjectBuilder::new().schema_type(text).enum_values(Some([$text]));
                literal.build().into()
            }
        }

        impl utoipa::ToSchema for $name {}
    )*};
}

pub(in crate::api) use literals;
