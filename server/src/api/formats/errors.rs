//! Middleware that writes errors in the format of the request's path, so that each client gets the format that it
//! reads.
//!
//! An [`ApiError`] travels with its response. This middleware rewrites the body in the format of the path, so that
//! errors of other middleware have that format, too.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{anthropic, llamacpp};
use crate::api::error::ApiError;

/// A format of error bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorFormat {
    OpenAi,
    Anthropic,
    LlamaCpp,
}

impl ErrorFormat {
    fn of(path: &str) -> Self {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Anthropic,
            "/completion" | "/completions" | "/infill" | "/props" | "/slots" => Self::LlamaCpp,
            path if path.starts_with("/slots/") => Self::LlamaCpp,
            _ => Self::OpenAi,
        }
    }
}

/// Runs a request, and writes its error in the format of its path. Must be the outermost middleware that can see
/// errors.
pub(in crate::api) async fn in_format_of_path(request: Request, next: Next) -> Response {
    let format = ErrorFormat::of(request.uri().path());
    let mut response = next.run(request).await;
    if format == ErrorFormat::Anthropic
        && let Some(id) = response.headers().get("x-request-id").cloned()
    {
        response.headers_mut().insert(HeaderName::from_static("request-id"), id);
    }
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let id = response.headers().get("x-request-id").and_then(|id: &HeaderValue| id.to_str().ok());
    match format {
        ErrorFormat::OpenAi => response,
        ErrorFormat::Anthropic => {
            let body = Json(anthropic::ErrorBody::new(&error, id)).into_response();
            with_body(response, body)
        }
        ErrorFormat::LlamaCpp => with_body(response, Json(llamacpp::ErrorBody::new(&error)).into_response()),
    }
}

/// Returns `response` with its body, content type and length replaced by those of `answer`.
fn with_body(response: Response, mut answer: Response) -> Response {
    let (parts, _) = response.into_parts();
    *answer.status_mut() = parts.status;
    let replaced = ["content-type", "content-length"];
    for (name, value) in &parts.headers {
        if !replaced.contains(&name.as_str()) {
            answer.headers_mut().append(name, value.clone());
        }
    }
    answer
}
