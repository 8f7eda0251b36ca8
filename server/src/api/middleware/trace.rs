//! A tracing span for each request, with the client's address and the request id, which the response also has.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::trace::FutureExt;
use rand::Rng;
use tracing::{Instrument, debug, field, info_span};

use crate::api::run::spans;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest request id in bytes that a client may set.
const MAX_ID_BYTES: usize = 128;

/// Runs the request in its span and returns the id as `x-request-id`: the client's, if it is valid, or a new one.
pub(in crate::api) async fn trace(request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok()).filter(|id| is_valid(id));
    let id = given.map_or_else(|| format!("req-{:032x}", rand::rng().random::<u128>()), str::to_owned);
    // The address of the connection: one that a header gives could be forged.
    let client = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(address)| *address);
    let span = info_span!(
        "request",
        id,
        client = client.map(field::display),
        method = %request.method(),
        path = request.uri().path(),
        key = field::Empty,
        prompt_tokens = field::Empty,
        completion_tokens = field::Empty,
        queue_ms = field::Empty,
        prefill_ms = field::Empty,
        decode_ms = field::Empty,
    );
    let context = spans::begin(&request, &id);
    let request_context = context.clone();
    async move {
        let mut response = next.run(request).await;
        spans::answered(&context, response.status());
        debug!(status = response.status().as_u16(), "response starts");
        if let Ok(value) = HeaderValue::try_from(id) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        response
    }
    .instrument(span)
    .with_context(request_context)
    .await
}

/// Whether an id has only letters, digits, `-`, `_` and `.`, so that it cannot forge a log line.
fn is_valid(id: &str) -> bool {
    (1..=MAX_ID_BYTES).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}
