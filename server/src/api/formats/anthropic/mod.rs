//! `/v1/messages` in Anthropic's format: messages in, one message of text and calls of tools out.

mod blocks;
mod encoder;
mod messages;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use serde_json::{Value, json};

pub(in crate::api) use self::encoder::error_body;
pub(in crate::api) use self::wire::MessagesRequest;
use super::json::{body as json_body, parse};
use crate::api::error::ApiError;
use crate::api::openapi::{GenerationErrors, schemas};
use crate::api::request::blocking::run_blocking;
use crate::api::state::AppState;

/// Count the tokens of messages in Anthropic's format
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    operation_id = "countTokens",
    tag = "other formats",
    request_body(content = schemas::CountRequest, examples(
        ("a message" = (value = json!({
            "model": "MODEL", "messages": [{"role": "user", "content": "Tell me of a fox."}]
        })))
    )),
    responses(
        (status = 200, description = "The number of tokens.", body = schemas::TokenCount,
            headers(("request-id" = String, description = "The same as `x-request-id`."))),
        GenerationErrors<schemas::AnthropicError>
    )
)]
pub(in crate::api) async fn count_tokens(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let counting = run_blocking(&state, move || parse::<MessagesRequest>(&body)?.count_tokens(&served));
    Ok(Json(json!({"input_tokens": counting.await?})))
}
