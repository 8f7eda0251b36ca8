//! Parameters that several routes share.

use utoipa::IntoParams;
use utoipa::openapi::Required;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};

macro_rules! headers {
    ($($name:ident = $header:literal, $pattern:expr, $description:literal;)*) => {$(
        pub(in crate::api) struct $name;

        impl IntoParams for $name {
            fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
                vec![header($header, $description, $pattern)]
            }
        }
    )*};
}

headers! {
    IdempotencyKey = "idempotency-key", Some("^[!-~]{1,255}$"),
        "A repeated request with the same key returns the first result and changes nothing.";
    IfMatch = "if-match", None,
        "The version that the session must have, as in its `etag`; `*` for any. Without a session it has no effect.";
    Prefer = "prefer", None,
        "`wait=SECONDS`: how long to wait for a session in use, at most 600 (RFC 7240). Default: do not wait.";
    LastEventId = "last-event-id", Some("^[0-9]{1,15}$"), "The number of the last event that was received.";
}

/// Returns the `x-request-id` parameter of every route.
pub(super) fn request_id() -> Parameter {
    let description = "Names the request in the server's log: up to 128 letters, digits, `-`, `_` and `.`. Otherwise \
                       the server chooses an id.";
    header("x-request-id", description, None)
}

fn header(name: &str, description: &str, pattern: Option<&str>) -> Parameter {
    let schema = ObjectBuilder::new().schema_type(Type::String).pattern(pattern).build();
    let parameter = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Header).required(Required::False);
    parameter.description(Some(description)).schema(Some(schema)).build()
}

/// The `id` parameter in a path.
pub(in crate::api) struct Id;

impl IntoParams for Id {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let schema = ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).build();
        let parameter = ParameterBuilder::new().name("id").parameter_in(ParameterIn::Path).required(Required::True);
        vec![parameter.description(Some("The object's id.")).schema(Some(schema)).build()]
    }
}
