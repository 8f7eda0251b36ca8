//! The page at `/docs`: Swagger UI, whose files are built into the binary, over `/openapi.json`.
//!
//! All addresses are relative, so that it works wherever a proxy puts the server.

use std::borrow::Cow;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::Uri;
use axum::response::{IntoResponse, Response};
use utoipa_swagger_ui::{Config, serve};

use crate::api::pages;
use crate::api::service::not_found;

/// It loads nothing but its own files and talks to nobody but this server. Swagger UI has its icons as data, and styles
/// in its elements.
const POLICY: &str = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'self'; frame-ancestors 'none'; object-src 'none'";

const PAGE: &str = include_str!("docs.html");
const START: &str = include_str!("docs.js");

const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// `GET /docs`
pub(in crate::api) async fn page() -> Response {
    pages::page("text/html; charset=utf-8", POLICY, PAGE)
}

/// `GET /docs/{file}`
pub(in crate::api) async fn file(name: Result<Path<String>, PathRejection>, uri: Uri) -> Response {
    let name = name.map(|Path(name)| name).unwrap_or_default();
    let found = match name.as_str() {
        "start.js" => Some(pages::page(JAVASCRIPT, POLICY, START)),
        "swagger-ui.css" => vendored(&name).map(|bytes| pages::page(CSS, POLICY, bytes)),
        "swagger-ui-bundle.js" => vendored(&name).map(|bytes| pages::page(JAVASCRIPT, POLICY, bytes)),
        _ => None,
    };
    match found {
        Some(response) => response,
        None => not_found(uri).await.into_response(),
    }
}

fn vendored(name: &str) -> Option<Bytes> {
    match serve(name, Arc::new(Config::default())).ok()??.bytes {
        Cow::Borrowed(bytes) => Some(Bytes::from_static(bytes)),
        Cow::Owned(bytes) => Some(bytes.into()),
    }
}
