//! Middleware other than authentication: CORS and other checks of browsers, limits on the head and the body, draining,
//! panics, and a trace of each request.

pub(super) mod body_memory;
pub(super) mod body_timeout;
pub(super) mod browsers;
pub(super) mod cors;
pub(super) mod draining;
pub(super) mod head_size;
pub(super) mod hosts;
pub(super) mod panics;
pub(super) mod trace;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::error::ApiError;

/// Creates the response to a request whose body was not received to its end. It closes the connection, because the rest
/// may still arrive and must not be read as the next request.
fn closing(error: ApiError) -> Response {
    let mut response = error.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
