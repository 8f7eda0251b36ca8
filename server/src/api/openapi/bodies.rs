//! Bodies that are not JSON.

use std::marker::PhantomData;

use utoipa::openapi::schema::{AnyOfBuilder, KnownFormat, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::{Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Server-sent events whose data is JSON of the type `T` or, in an error at the end, `E`. The schema describes one
/// event as browsers present it.
pub(in crate::api) struct Events<T, E>(PhantomData<(T, E)>);

impl<T: ToSchema, E: ToSchema> PartialSchema for Events<T, E> {
    fn schema() -> RefOr<Schema> {
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let json =
            |name| text().content_media_type("application/json").content_schema(Some(Ref::from_schema_name(name)));
        let done = text().enum_values(Some(["[DONE]"]));
        let data = AnyOfBuilder::new().item(json(T::name())).item(json(E::name())).item(done).build();
        let event = ObjectBuilder::new().schema_type(Type::Object).property("data", Schema::AnyOf(data));
        event.required("data").property("event", text()).property("id", text()).build().into()
    }
}

impl<T: ToSchema, E: ToSchema> ToSchema for Events<T, E> {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.extend([(T::name().into_owned(), T::schema()), (E::name().into_owned(), E::schema())]);
        T::schemas(schemas);
        E::schemas(schemas);
    }
}

/// Bytes of any kind.
pub(in crate::api) struct Bytes;

impl PartialSchema for Bytes {
    fn schema() -> RefOr<Schema> {
        let format = SchemaFormat::KnownFormat(KnownFormat::Binary);
        ObjectBuilder::new().schema_type(Type::String).format(Some(format)).build().into()
    }
}

impl ToSchema for Bytes {}
