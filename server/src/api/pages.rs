//! The server's own pages as they go out: what a browser is told of each.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// A file of a page, of the media type `kind`, which may load and do what `policy` says.
pub(super) fn page(kind: &'static str, policy: &'static str, contents: impl IntoResponse) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        // The page belongs to this build: a newer server must not be met with an older page.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ]
    .map(|(name, value): (HeaderName, &'static str)| (name, HeaderValue::from_static(value)));
    let mut response = contents.into_response();
    for (name, value) in headers {
        response.headers_mut().insert(name, value);
    }
    response
}
