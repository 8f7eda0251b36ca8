//! Refusals in the words of the format that a path belongs to: each client reads its own.
//!
//! Whoever refuses says so as an [`ApiError`], which is in OpenAI's shape; it travels with the response, and where the
//! path is another format's, it is said again here. So it holds for what refuses before a handler, too.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::api::error::ApiError;
use crate::api::formats::{anthropic, llamacpp};

/// The formats that have a shape of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    OpenAi,
    Anthropic,
    LlamaCpp,
}

impl Shape {
    fn of(path: &str) -> Self {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Anthropic,
            "/completion" | "/completions" | "/infill" | "/props" | "/slots" => Self::LlamaCpp,
            _ => Self::OpenAi,
        }
    }
}

/// Runs a request, and says its refusal in the words of its path. To be outside of all that refuses.
pub(in crate::api) async fn by_path(request: Request, next: Next) -> Response {
    let shape = Shape::of(request.uri().path());
    let mut response = next.run(request).await;
    if shape == Shape::Anthropic
        && let Some(id) = response.headers().get("x-request-id").cloned()
    {
        response.headers_mut().insert(HeaderName::from_static("request-id"), id);
    }
    let Some(error) = response.extensions_mut().remove::<ApiError>() else { return response };
    let id = response.headers().get("x-request-id").and_then(|id: &HeaderValue| id.to_str().ok());
    match shape {
        Shape::OpenAi => response,
        Shape::Anthropic => {
            let body = anthropic::refusal(&error, id);
            said(response, body)
        }
        Shape::LlamaCpp => said(response, llamacpp::refusal(&error)),
    }
}

/// The same response with another body.
fn said(response: Response, body: Value) -> Response {
    let (parts, _) = response.into_parts();
    let mut answer = Json(body).into_response();
    *answer.status_mut() = parts.status;
    let own = ["content-type", "content-length"];
    for (name, value) in &parts.headers {
        if !own.contains(&name.as_str()) {
            answer.headers_mut().append(name, value.clone());
        }
    }
    answer
}
