//! `/v1/messages` in Anthropic's format: messages in, one message of text and calls of tools out.

mod blocks;
mod events;
mod tools;
mod wire;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use self::events::{Event, Message};
use self::wire::{CountRequest, MessagesRequest};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::foreign;
use crate::api::formats::openai::reading;
use crate::api::formats::openai::wire::{body as json_body, parse};
use crate::api::openapi::{Events, GenerationErrors};
use crate::api::state::AppState;

type MessageEvents = Events<Event<'static>, AnthropicError>;

/// Answer messages in Anthropic's format
#[utoipa::path(
    post,
    path = "/v1/messages",
    operation_id = "createMessage",
    tag = "other formats",
    request_body(content = MessagesRequest, examples(
        ("a message" = (value = json!({
            "model": "MODEL", "messages": [{"role": "user", "content": "Tell me of a fox."}],
            "max_tokens": 8, "temperature": 0
        }))),
        ("prefilled answer" = (value = json!({
            "model": "MODEL", "max_tokens": 8, "system": "You tell tales.",
            "messages": [{"role": "user", "content": "Tell me of a fox."}, {"role": "assistant", "content": "A fox"}]
        }))),
        ("stream" = (value = json!({
            "model": "MODEL", "messages": [{"role": "user", "content": "Tell me of a fox."}],
            "max_tokens": 8, "stream": true
        })))
    )),
    responses(
        (status = 200, description = "The answer. With `stream`: Anthropic's named events.",
            content(
                (Message = "application/json"),
                (inline(MessageEvents) = "text/event-stream")
            ),
            headers(("request-id" = String, description = "The same as `x-request-id`."))),
        GenerationErrors<AnthropicError>
    )
)]
pub(in crate::api) async fn create(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    foreign::create::<events::Begins>(state, owner, &headers, body).await
}

/// The number of prompt tokens.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TokenCount {
    input_tokens: usize,
}

/// Count the tokens of messages in Anthropic's format
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    operation_id = "countTokens",
    tag = "other formats",
    request_body(content = CountRequest, examples(
        ("a message" = (value = json!({
            "model": "MODEL", "messages": [{"role": "user", "content": "Tell me of a fox."}]
        })))
    )),
    responses(
        (status = 200, description = "The number of tokens.", body = TokenCount,
            headers(("request-id" = String, description = "The same as `x-request-id`."))),
        GenerationErrors<AnthropicError>
    )
)]
pub(in crate::api) async fn count_tokens(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<TokenCount>, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let served = std::sync::Arc::clone(state.ready()?);
    let counting = reading(&state, move || {
        let wire: MessagesRequest = parse(&body)?;
        Ok(wire.read(&served)?.0.len())
    });
    Ok(Json(TokenCount { input_tokens: counting.await? }))
}

/// An error in this format.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct AnthropicError {
    #[serde(rename = "type")]
    #[schema(pattern = "^error$")]
    kind: &'static str,
    error: ErrorDetails,
    #[schema(required)]
    request_id: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = AnthropicErrorDetails)]
struct ErrorDetails {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

/// An error as this format says it; the id is the request's.
pub(in crate::api) fn refusal(error: &ApiError, id: Option<&str>) -> Value {
    let kind = match error.status().as_u16() {
        401 => "authentication_error",
        402 => "billing_error",
        403 => "permission_error",
        404 => "not_found_error",
        408 | 504 => "timeout_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    let error = ErrorDetails { kind, message: error.message().to_owned() };
    let body = AnthropicError { kind: "error", error, request_id: id.map(str::to_owned) };
    serde_json::to_value(body).expect("strings become JSON")
}
