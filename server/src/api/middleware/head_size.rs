//! The limit on the head of a request.

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::error::ApiError;

/// Longest head of a request in bytes: its first line, the headers and the empty line.
const MAX_HEAD_BYTES: usize = 32 << 10;

/// Middleware that answers 431 to longer heads.
pub(in crate::api) async fn limit_head(request: Request, next: Next) -> Response {
    if head_bytes(&request) <= MAX_HEAD_BYTES {
        return next.run(request).await;
    }
    let status = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    let message = format!("the request's first line and headers must be at most {MAX_HEAD_BYTES} bytes");
    let mut response = ApiError::request(status, None, Some("headers_too_large"), message).into_response();
    // Close the connection, as for even longer heads, so that the client sends no second one.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

fn head_bytes(request: &Request) -> usize {
    let uri = request.uri();
    let scheme = uri.scheme_str().map_or(0, |scheme| scheme.len() + "://".len());
    let authority = uri.authority().map_or(0, |authority| authority.as_str().len());
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    let first = request.method().as_str().len() + scheme + authority + path + "  HTTP/1.1\r\n".len();
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    first + headers.sum::<usize>() + "\r\n".len()
}
