//! The page at `/`, built into the binary.

use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};

use super::pages::page;
use super::service::not_found;

/// The page loads nothing but its own files and talks to nobody but this server.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'";

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

pub(super) async fn index() -> Response {
    page("text/html; charset=utf-8", POLICY, include_str!("../playground/index.html"))
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
        Some((_, kind, contents)) => page(kind, POLICY, *contents),
        None => not_found(uri).await.into_response(),
    }
}

/// Browsers ask for it unasked; an empty answer keeps their console and our log quiet.
pub(super) async fn favicon() -> StatusCode {
    StatusCode::NO_CONTENT
}
