//! The page at `/`, built into the binary.

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// The page loads nothing but its own files and talks to nobody but this server.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'";

pub(super) async fn index() -> Response {
    page("text/html; charset=utf-8", include_str!("../playground/index.html"))
}

pub(super) async fn style() -> Response {
    page("text/css; charset=utf-8", include_str!("../playground/style.css"))
}

pub(super) async fn script() -> Response {
    page("text/javascript; charset=utf-8", include_str!("../playground/app.js"))
}

/// Browsers ask for it unasked; an empty answer keeps their console and our log quiet.
pub(super) async fn favicon() -> StatusCode {
    StatusCode::NO_CONTENT
}

fn page(kind: &'static str, contents: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        // The page belongs to this build: a newer server must not be met with an older page.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ]
    .map(|(name, value): (HeaderName, &'static str)| (name, HeaderValue::from_static(value)));
    (headers, contents).into_response()
}
