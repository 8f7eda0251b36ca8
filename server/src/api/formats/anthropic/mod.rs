//! `/v1/messages` in Anthropic's format: messages in, one message with text and tool calls out.

mod blocks;
mod encoder;
mod messages;
mod output;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

pub(in crate::api) use self::encoder::{ErrorBody, Event, Message};
use self::wire::CountRequest;
pub(in crate::api) use self::wire::MessagesRequest;
use super::json::{body as json_body, parse};
use crate::api::error::ApiError;
use crate::api::openapi::GenerationErrors;
use crate::api::request::blocking::run_blocking;
use crate::api::state::AppState;

/// How many tokens a request would read.
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
        GenerationErrors<ErrorBody<'_>>
    )
)]
pub(in crate::api) async fn count_tokens(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let state = state.for_body(&body).await?;
    let served = Arc::clone(state.ready()?);
    let counting = run_blocking(&state, body.len(), move || parse::<MessagesRequest>(&body)?.count_tokens(&served));
    let (input_tokens, ignored) = counting.await?;
    Ok(ignored.list(Json(TokenCount { input_tokens }).into_response()))
}
