//! The page at `/`, built into the binary.

use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

use super::service::not_found;

/// The page loads nothing but its own files and talks to nobody but this server.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'";

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

pub(super) async fn index() -> Response {
    page("text/html; charset=utf-8", include_str!("../playground/index.html"))
}

/// What the page loads: each file's name, type and contents.
const FILES: [(&str, &str, &str); 14] = [
    ("style.css", CSS, include_str!("../playground/style.css")),
    ("sessions.css", CSS, include_str!("../playground/sessions.css")),
    ("theme.js", JAVASCRIPT, include_str!("../playground/theme.js")),
    ("app.js", JAVASCRIPT, include_str!("../playground/app.js")),
    ("conversation.js", JAVASCRIPT, include_str!("../playground/conversation.js")),
    ("gauge.js", JAVASCRIPT, include_str!("../playground/gauge.js")),
    ("key.js", JAVASCRIPT, include_str!("../playground/key.js")),
    ("level.js", JAVASCRIPT, include_str!("../playground/level.js")),
    ("sessions.js", JAVASCRIPT, include_str!("../playground/sessions.js")),
    ("sheet.js", JAVASCRIPT, include_str!("../playground/sheet.js")),
    ("shelf.js", JAVASCRIPT, include_str!("../playground/shelf.js")),
    ("sse.js", JAVASCRIPT, include_str!("../playground/sse.js")),
    ("texts.js", JAVASCRIPT, include_str!("../playground/texts.js")),
    ("tree.js", JAVASCRIPT, include_str!("../playground/tree.js")),
];

pub(super) async fn file(uri: Uri) -> Response {
    let name = uri.path().rsplit('/').next();
    match FILES.iter().find(|(file, ..)| Some(*file) == name) {
        Some((_, kind, contents)) => page(kind, contents),
        None => not_found(uri).await.into_response(),
    }
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
