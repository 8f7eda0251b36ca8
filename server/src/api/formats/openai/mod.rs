//! Requests for text, whatever their format: from the body to a run.

pub(in crate::api) mod answer;
pub(in crate::api) mod logprobs;
pub(in crate::api) mod wire;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use tracing::debug;

use crate::api::auth::owner::Caller;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::formats::chat::Chat;
use crate::api::formats::completions::Completions;
use crate::api::formats::openai::answer::{Head, Wanted, replay};
use crate::api::formats::openai::wire::{ChatRequest, CompletionRequest, Format, GenerationRequest};
use crate::api::formats::unsupported;
use crate::api::openapi::{
    Error, Events, GenerationErrors, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, schemas,
};
use crate::api::request::origin::Origin;
use crate::api::request::validate::{Validated, validate};
use crate::api::run::account::Account;
use crate::api::run::encoder::Dialect;
use crate::api::run::idempotency::{Attempt, attempt};
use crate::api::run::sink;
use crate::api::run::texts::Texts;
use crate::api::run::{OnDisconnect, Run};
use crate::api::sessions::label;
use crate::api::state::AppState;

type CompletionEvents = Events<schemas::CompletionChunk, ErrorBody>;
type ChatEvents = Events<schemas::ChatChunk, ErrorBody>;

/// Complete a text
///
/// OpenAI's format. With `session`, it is a turn of a stored conversation. Unsupported fields of other servers are
/// refused if they would change the result, and ignored otherwise.
#[utoipa::path(
    post,
    path = "/v1/completions",
    operation_id = "createCompletion",
    tag = "text",
    params(IdempotencyKey, IfMatch, Prefer),
    request_body(content = CompletionRequest, examples(
        ("text" = (value = json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}))),
        ("several prompts, until a full stop" = (value = json!({
            "prompt": ["The old house", "A fox"], "max_tokens": 8, "stop": "."
        }))),
        ("token ids" = (value = json!({
            "prompt": [5, 6, 7], "max_tokens": 2, "seed": 7, "return_token_ids": true
        }))),
        ("two texts with log probabilities" = (value = json!({
            "prompt": "Once", "n": 2, "max_tokens": 2, "logprobs": 2
        }))),
        ("regular expression" = (value = json!({"prompt": "A number:", "max_tokens": 8, "regex": "[0-9]{1,4}"}))),
        ("stream" = (value = json!({
            "prompt": "Once", "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true}
        })))
    )),
    responses(
        (status = 200, description = "The text. With `stream`: events without names, each with a `CompletionChunk`; the \
                                      last is `[DONE]`. An error in the stream ends it with an `Error`.",
            content((schemas::Completion = "application/json"), (inline(CompletionEvents) = "text/event-stream")),
            headers(("x-stream-id" = String, description = "The id of a resumable stream."))),
        GenerationErrors,
        IdempotencyErrors,
        Error<412>,
        Error<501>,
        Error<507>
    )
)]
pub(in crate::api) async fn completions(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    create(Format::Completions, state, caller, headers, body).await
}

/// Answer messages
///
/// OpenAI's format. The checkpoint's chat template turns the messages into a prompt.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    operation_id = "createChatCompletion",
    tag = "text",
    params(IdempotencyKey, IfMatch, Prefer),
    request_body(content = ChatRequest, examples(
        ("a message" = (value = json!({
            "messages": [{"role": "user", "content": "Tell me of a fox."}], "max_completion_tokens": 8, "temperature": 0
        }))),
        ("content parts" = (value = json!({
            "messages": [
                {"role": "system", "content": "You tell tales."},
                {"role": "user", "content": [{"type": "text", "text": "Tell me of a fox."}]}
            ],
            "max_tokens": 8, "top_p": 0.9, "seed": 7
        }))),
        ("two answers with log probabilities" = (value = json!({
            "messages": [{"role": "user", "content": "Tell me of a fox."}],
            "n": 2, "max_tokens": 2, "logprobs": true, "top_logprobs": 1
        }))),
        ("JSON schema" = (value = json!({
            "messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 64,
            "response_format": {"type": "json_schema", "json_schema": {"name": "fox", "schema": {
                "type": "object", "required": ["size"], "additionalProperties": false,
                "properties": {"size": {"enum": ["small", "large"]}}
            }}}
        }))),
        ("tool" = (value = json!({
            "messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 64,
            "tools": [{"type": "function", "function": {"name": "measure", "parameters": {
                "type": "object", "required": ["size"], "additionalProperties": false,
                "properties": {"size": {"enum": ["small", "large"]}}
            }}}],
            "tool_choice": "required", "stream": true
        }))),
        ("stream" = (value = json!({
            "messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 4, "stream": true
        })))
    )),
    responses(
        (status = 200, description = "The answer. With `stream`: events without names, each with a `ChatChunk`; the last \
                                      is `[DONE]`. An error in the stream ends it with an `Error`.",
            content((schemas::Chat = "application/json"), (inline(ChatEvents) = "text/event-stream")),
            headers(("x-stream-id" = String, description = "The id of a resumable stream."))),
        GenerationErrors,
        IdempotencyErrors,
        Error<412>,
        Error<501>,
        Error<507>
    )
)]
pub(in crate::api) async fn chat(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    create(Format::Chat, state, caller, headers, body).await
}

async fn create(
    format: Format,
    state: AppState,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = wire::body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let attempt = attempt(&state, owner, &headers, format.path(), &body).await?;
    let parsing = reading(&state, move || {
        let mut wire: GenerationRequest = wire::parse(&body)?;
        wire.take_forms()?;
        unsupported::refuse(format, &wire.rest)?;
        // Nothing else is made of them, and the request may have to wait.
        wire.rest.clear();
        Ok(wire)
    });
    let wire = parsing.await?;
    let stream = wire.stream.unwrap_or(false);
    let ticket = match attempt {
        Attempt::Unmarked => None,
        Attempt::First(ticket) => Some(ticket),
        Attempt::Again(body) if stream => {
            let words = replay(&body, wire.include_usage());
            return Ok(sink::replayed(words, state.options().keep_alive));
        }
        Attempt::Again(body) => return Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response()),
    };
    let (on_disconnect, label) = (on_disconnect(&wire)?, label(wire.label.clone())?);
    let origin = Origin::find(&state, &served, owner, &headers, &wire).await?;
    let (validated, origin) = {
        let served = Arc::clone(&served);
        reading(&state, move || Ok((validate(format, wire, &served, &origin)?, origin))).await?
    };
    let Validated { requests, prompts, cached, include_usage, return_token_ids, seed, details } = validated;
    debug!(seed, prompts = prompts.len(), texts = requests.len(), stream, "completion starts");
    let account = Account::new(&prompts, cached);
    let wanted = Wanted { include_usage, token_ids: return_token_ids, whole: !stream || ticket.is_some() };
    let dialect: Box<dyn Dialect> = match format {
        Format::Completions => Box::new(Completions::new(Head::new("cmpl", &served), wanted, &prompts, details)),
        _ => Box::new(Chat::new(Head::new("chatcmpl", &served), wanted, &details)),
    };
    let texts = Texts::new(account, served.engine.submit_all(requests)?);
    let keeping = origin.keeping(label);
    Run { state, served, texts, dialect, keeping, on_disconnect, ticket }.answer(stream).await
}

/// What is to happen where the client leaves: only a session's turn can outlive it.
fn on_disconnect(wire: &GenerationRequest) -> Result<OnDisconnect, ApiError> {
    match wire.on_disconnect {
        None | Some(OnDisconnect::Rollback) => Ok(OnDisconnect::Rollback),
        Some(asked) if wire.session.is_some() => Ok(asked),
        Some(_) => {
            let message = "on_disconnect must be rollback where there is no session to commit to";
            Err(ApiError::invalid(Some("on_disconnect"), message))
        }
    }
}

/// Runs `work` away from the connections' threads: a long prompt takes a while to parse and to encode, and other
/// connections must not wait for it.
pub(in crate::api) async fn reading<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = state.reader().await;
    let reading = tokio::task::spawn_blocking(move || {
        // Held to the end of the work, also where the client leaves before.
        let _permit = permit;
        work()
    });
    reading.await.map_err(|_| ApiError::internal())?
}
