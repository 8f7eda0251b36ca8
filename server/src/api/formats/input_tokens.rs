//! Counts the tokens that a request would read, without generating: OpenAI's `/v1/responses/input_tokens`, and
//! llama.cpp's similar route for chat. The `anthropic` module has `/v1/messages/count_tokens`.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

use super::chat::ChatRequest;
use super::format::{Converted, Format};
use super::json::{body as json_body, parse};
use super::openai::invalid;
use super::responses::{self, ResponseRequest};
use super::unsupported::Ignored;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::literals::literals;
use crate::api::openapi::schemas::only;
use crate::api::openapi::{Error, GenerationErrors};
use crate::api::request::blocking::run_blocking;
use crate::api::state::{AppState, Served};
use crate::session::Snapshot;

literals!(InputTokensKind = "response.input_tokens");

/// How many tokens a request would read.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct InputTokens {
    #[schema(inline)]
    object: InputTokensKind,
    /// With `previous_response_id`, this includes the tokens of the conversation that is continued.
    input_tokens: u64,
}

/// The fields of a chat request that make up the prompt.
pub(in crate::api) struct ChatTokensRequest;

impl utoipa::PartialSchema for ChatTokensRequest {
    fn schema() -> RefOr<Schema> {
        only::<ChatRequest>(&[
            "model",
            "messages",
            "tools",
            "tool_choice",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template_kwargs",
        ])
    }
}

impl ToSchema for ChatTokensRequest {}

/// The fields of a request for a response that make up the prompt.
pub(in crate::api) struct ResponseTokensRequest;

impl utoipa::PartialSchema for ResponseTokensRequest {
    fn schema() -> RefOr<Schema> {
        only::<ResponseRequest>(&["model", "input", "instructions", "previous_response_id", "tools", "tool_choice"])
    }
}

impl ToSchema for ResponseTokensRequest {}

/// Count the tokens of messages
///
/// Takes the body of a chat request. Fields that concern only the answer have no effect.
#[utoipa::path(
    post,
    path = "/v1/chat/completions/input_tokens",
    operation_id = "countChatTokens",
    tag = "other formats",
    request_body(content = ChatTokensRequest, examples(
        ("a message" = (value = json!({"messages": [{"role": "user", "content": "Tell me of a fox."}]})))
    )),
    responses((status = 200, description = "The number of tokens.", body = InputTokens), GenerationErrors)
)]
pub(in crate::api) async fn of_chat(
    State(state): State<AppState>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let state = state.for_body(&body).await?;
    let served = Arc::clone(state.ready()?);
    let counting = run_blocking(&state, body.len(), move || count(parse::<ChatRequest>(&body)?, &served, None));
    Ok(answer(counting.await?))
}

/// Count the tokens of a response's input
///
/// Takes the body of a request for a response. Fields that concern only the answer have no effect.
#[utoipa::path(
    post,
    path = "/v1/responses/input_tokens",
    operation_id = "countResponseTokens",
    tag = "text",
    request_body(content = ResponseTokensRequest, examples(
        ("text" = (value = json!({"input": "Tell me of a fox."})))
    )),
    responses(
        (status = 200, description = "The number of tokens.", body = InputTokens),
        GenerationErrors,
        Error<501>
    )
)]
pub(in crate::api) async fn of_response(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let state = state.for_body(&body).await?;
    let served = Arc::clone(state.ready()?);
    let bytes = body.len();
    let wire = run_blocking(&state, bytes, move || parse::<ResponseRequest>(&body)).await?;
    let base = responses::base(&wire, &state, owner).await?;
    let counting = run_blocking(&state, bytes, move || count(wire, &served, base.as_deref()));
    Ok(answer(counting.await?))
}

/// Counts the tokens of `base` and those that a request would read after it. Also returns the fields that have no
/// effect.
fn count<F: Format>(wire: F, served: &Served, base: Option<&Snapshot>) -> Result<(u64, Ignored), ApiError> {
    let Converted { request, session, ignored, .. } = wire.convert(served)?;
    let continues = [("session", session.session.is_some()), ("state", session.state.is_some())];
    if let Some((name, _)) = continues.into_iter().find(|(_, given)| *given) {
        return Err(invalid(name, format!("{name} must be absent: only messages are counted here")));
    }
    if let Some(model) = &request.model {
        served.check_name(model, Some("model"))?;
    }
    let prompts = request.prompt.encode(request.names.prompt, request.tools.as_ref(), served, base)?;
    let new: usize = prompts.iter().map(Vec::len).sum();
    Ok((base.map_or(0, Snapshot::tokens) + new as u64, ignored))
}

fn answer((input_tokens, ignored): (u64, Ignored)) -> Response {
    ignored.list(Json(InputTokens { object: InputTokensKind, input_tokens }).into_response())
}
