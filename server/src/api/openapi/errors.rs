//! The error responses of routes. `document.rs` adds those that every route has.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use utoipa::openapi::{ContentBuilder, Ref, RefOr, Response, ResponseBuilder};
use utoipa::{IntoResponses, ToSchema};

use crate::api::error::ErrorBody;

type Responses = BTreeMap<String, RefOr<Response>>;

fn errors<T: ToSchema>(statuses: &[u16]) -> Responses {
    let response = |status: &u16| {
        let content = ContentBuilder::new().schema(Some(Ref::from_schema_name(T::name()))).build();
        let response = ResponseBuilder::new().description(meaning(*status)).content("application/json", content);
        (status.to_string(), response.build().into())
    };
    statuses.iter().map(response).collect()
}

/// Returns what a status means on every route.
pub(super) fn meaning(status: u16) -> &'static str {
    match status {
        400 => "A parameter is invalid; `param` names it, and the message states what is accepted.",
        401 => "The API key is missing or unknown.",
        403 => {
            "The API key lacks the scope, the owner's storage quota is used up, or a web page of another origin sent the request."
        }
        404 => "The object does not exist, or belongs to another owner.",
        408 => "The request took longer than the server allows, or the client stopped reading.",
        409 => {
            "The session is in use, another server has changed it meanwhile (`session_changed`: read the session and send the \
                request again), or a request with the same `idempotency-key` is running or has ended meanwhile."
        }
        410 => "The requested events are no longer available.",
        412 => "The session's version differs from `if-match`.",
        413 => "The body is too large.",
        415 => "The content type is not supported.",
        422 => "The `idempotency-key` was used for a different request.",
        429 => {
            "The queue is full, too many requests wait for sessions, log probabilities or bodies take too much memory, or the \
             API key is over its quota."
        }
        500 => "The server failed.",
        501 => "Not supported by this server: it has no store, no secret, or too low a limit.",
        503 => "The model is loading, the server is shutting down, or another server computes the stream.",
        507 => "The store is full.",
        _ => "Refused.",
    }
}

/// One error response, in OpenAI's format unless `T` is the error body of another format.
pub(in crate::api) struct Error<const STATUS: u16, T = ErrorBody>(PhantomData<T>);

impl<const STATUS: u16, T: ToSchema> IntoResponses for Error<STATUS, T> {
    fn responses() -> Responses {
        errors::<T>(&[STATUS])
    }
}

/// Defines sets of errors that several routes share.
macro_rules! error_sets {
    ($($(#[$meta:meta])* $name:ident = $statuses:expr;)+) => {$(
        $(#[$meta])*
        pub(in crate::api) struct $name<T = ErrorBody>(PhantomData<T>);

        impl<T: ToSchema> IntoResponses for $name<T> {
            fn responses() -> Responses {
                errors::<T>(&$statuses)
            }
        }
    )+};
}

error_sets! {
    /// The errors of routes that generate.
    GenerationErrors = [400, 404, 408, 413, 415, 503];
    /// The errors of routes that generate and may continue a conversation.
    TurnErrors = [400, 404, 408, 409, 412, 413, 415, 422, 501, 503, 507];
    /// The errors of routes that read stored objects.
    StoreErrors = [400, 404, 501, 503];
    /// The errors of routes with a body.
    BodyErrors = [400, 413, 415];
    /// The errors of routes that take an `idempotency-key`.
    IdempotencyErrors = [409, 422];
}
