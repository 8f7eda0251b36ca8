//! The server's own pages, embedded in the binary: the playground at `/` and the API page at `/docs`.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

use super::openapi::Error;
use super::service::unknown_path;

/// The content security policy: pages may load their own files and connect to this server, and nothing else.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// A file's name, media type and contents.
type File = (&'static str, &'static str, &'static str);

const PLAYGROUND: [File; 24] = [
    ("style.css", CSS, include_str!("../playground/style.css")),
    ("sessions.css", CSS, include_str!("../playground/sessions.css")),
    ("chat.css", CSS, include_str!("../playground/chat.css")),
    ("theme.js", JAVASCRIPT, include_str!("../playground/theme.js")),
    ("app.js", JAVASCRIPT, include_str!("../playground/app.js")),
    ("arrivals.js", JAVASCRIPT, include_str!("../playground/arrivals.js")),
    ("card.js", JAVASCRIPT, include_str!("../playground/card.js")),
    ("chat.js", JAVASCRIPT, include_str!("../playground/chat.js")),
    ("code.js", JAVASCRIPT, include_str!("../playground/code.js")),
    ("conversation.js", JAVASCRIPT, include_str!("../playground/conversation.js")),
    ("gauge.js", JAVASCRIPT, include_str!("../playground/gauge.js")),
    ("health.js", JAVASCRIPT, include_str!("../playground/health.js")),
    ("key.js", JAVASCRIPT, include_str!("../playground/key.js")),
    ("level.js", JAVASCRIPT, include_str!("../playground/level.js")),
    ("reader.js", JAVASCRIPT, include_str!("../playground/reader.js")),
    ("remember.js", JAVASCRIPT, include_str!("../playground/remember.js")),
    ("sessions.js", JAVASCRIPT, include_str!("../playground/sessions.js")),
    ("sheet.js", JAVASCRIPT, include_str!("../playground/sheet.js")),
    ("shelf.js", JAVASCRIPT, include_str!("../playground/shelf.js")),
    ("sse.js", JAVASCRIPT, include_str!("../playground/sse.js")),
    ("story.js", JAVASCRIPT, include_str!("../playground/story.js")),
    ("texts.js", JAVASCRIPT, include_str!("../playground/texts.js")),
    ("tree.js", JAVASCRIPT, include_str!("../playground/tree.js")),
    ("turn.js", JAVASCRIPT, include_str!("../playground/turn.js")),
];

const DOCS: [File; 2] =
    [("docs.css", CSS, include_str!("../docs/docs.css")), ("docs.js", JAVASCRIPT, include_str!("../docs/docs.js"))];

fn respond(kind: &'static str, contents: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        // A cached page of an older build may not match this server.
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers.map(|(name, value)| (name, HeaderValue::from_static(value))), contents).into_response()
}

fn respond_file(files: &[File], name: &Result<Path<String>, PathRejection>, uri: &Uri) -> Response {
    match files.iter().find(|(file, ..)| name.as_ref().is_ok_and(|Path(name)| name == file)) {
        Some((_, kind, contents)) => respond(kind, contents),
        None => unknown_path(uri.path(), None).into_response(),
    }
}

/// The playground
#[utoipa::path(
    get,
    path = "/",
    operation_id = "playground",
    tag = "pages",
    responses((status = 200, description = "The page.", body = String, content_type = HTML))
)]
pub(super) async fn playground() -> Response {
    respond(HTML, include_str!("../playground/index.html"))
}

/// A file of the playground
#[utoipa::path(
    get,
    path = "/playground/{file}",
    operation_id = "playgroundFile",
    tag = "pages",
    params(("file" = String, Path, min_length = 1, description = "The file's name.")),
    responses(
        (status = 200, description = "The file.", content((String = CSS), (String = JAVASCRIPT))),
        Error<404>
    )
)]
pub(super) async fn playground_file(name: Result<Path<String>, PathRejection>, uri: Uri) -> Response {
    respond_file(&PLAYGROUND, &name, &uri)
}

/// The API page
#[utoipa::path(
    get,
    path = "/docs",
    operation_id = "docs",
    tag = "pages",
    responses((status = 200, description = "The page.", body = String, content_type = HTML))
)]
pub(super) async fn docs() -> Response {
    respond(HTML, include_str!("../docs/index.html"))
}

/// A file of the API page
#[utoipa::path(
    get,
    path = "/docs/{file}",
    operation_id = "docsFile",
    tag = "pages",
    params(("file" = String, Path, min_length = 1, description = "The file's name.")),
    responses(
        (status = 200, description = "The file.", content((String = CSS), (String = JAVASCRIPT))),
        Error<404>
    )
)]
pub(super) async fn docs_file(name: Result<Path<String>, PathRejection>, uri: Uri) -> Response {
    respond_file(&DOCS, &name, &uri)
}

/// The pages' icon, which is empty
///
/// Browsers always request it, and an empty response avoids an error in their console.
#[utoipa::path(
    get,
    path = "/favicon.ico",
    operation_id = "icon",
    tag = "pages",
    responses((status = 204, description = "There is no icon."))
)]
pub(super) async fn favicon() -> StatusCode {
    StatusCode::NO_CONTENT
}
