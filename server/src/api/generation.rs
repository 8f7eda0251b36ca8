//! The routes that generate text, one for each format.

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;

use super::auth::owner::Caller;
use super::error::{ApiError, ErrorBody};
use super::formats::anthropic::{self, MessagesRequest};
use super::formats::chat::{Chat, ChatChunk, ChatRequest};
use super::formats::completions::{Completion, CompletionChunk, CompletionRequest};
use super::formats::format::generate;
use super::formats::llamacpp::{self, LlamaRequest};
use super::formats::responses::{self, Object as ResponseObject, ResponseRequest};
use super::openapi::{Error, Events, GenerationErrors, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, TurnErrors};
use super::state::AppState;

type Body = Result<Bytes, BytesRejection>;
type CompletionEvents = Events<CompletionChunk<'static>, ErrorBody>;
type ChatEvents = Events<ChatChunk<'static>, ErrorBody>;
type ResponseEvents = Events<responses::Event<'static>, ErrorBody>;
type Message = anthropic::Message<'static>;
type MessageError = anthropic::ErrorBody<'static>;
type MessageEvents = Events<anthropic::Event<'static>, MessageError>;
type LlamaCompletions = llamacpp::Completions<'static>;
type LlamaError = llamacpp::ErrorBody<'static>;
type LlamaEvents = Events<llamacpp::Event<'static>, LlamaError>;

/// Complete a text
///
/// OpenAI's format. With `session`, the request is a turn of a stored conversation. Unsupported fields of other servers
/// are refused if they would change the result, and ignored otherwise.
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
            content((Completion = "application/json"), (inline(CompletionEvents) = "text/event-stream")),
            headers(
                ("etag" = String, description = "With `session`: the version that the turn makes."),
                ("x-session-version" = String, description = "The same without quotes. In a stream it comes before the \
                                                              commit: a turn that fails or is rolled back makes no version."),
                ("x-stream-id" = String, description = "The id of a resumable stream.")
            )),
        TurnErrors
    )
)]
pub(super) async fn completions(
    state: State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    generate::<CompletionRequest>(state, caller, headers, body).await
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
            content((Chat = "application/json"), (inline(ChatEvents) = "text/event-stream")),
            headers(
                ("etag" = String, description = "With `session`: the version that the turn makes."),
                ("x-session-version" = String, description = "The same without quotes. In a stream it comes before the \
                                                              commit: a turn that fails or is rolled back makes no version."),
                ("x-stream-id" = String, description = "The id of a resumable stream.")
            )),
        TurnErrors
    )
)]
pub(super) async fn chat(
    state: State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    generate::<ChatRequest>(state, caller, headers, body).await
}

/// Create a response
///
/// OpenAI's Responses API. A later response can continue from a stored one at the cost of its new tokens only.
/// `instructions` of an earlier response stay in effect, because the model has read them. Inputs are not stored. A tool
/// call is an item of the output; the client sends its result as an item of the next input.
#[utoipa::path(
    post,
    path = "/v1/responses",
    operation_id = "createResponse",
    tag = "text",
    params(IdempotencyKey),
    request_body(content = ResponseRequest, examples(
        ("text" = (value = json!({"input": "Tell me of a fox.", "max_output_tokens": 8, "temperature": 0}))),
        ("messages" = (value = json!({
            "input": [{"role": "user", "content": "Tell me of a fox."}],
            "instructions": "Be brief.", "max_output_tokens": 8, "store": false
        }))),
        ("a tool" = (value = json!({
            "input": "How large is a fox?", "max_output_tokens": 60, "temperature": 0, "tool_choice": "required",
            "tools": [{"type": "function", "name": "measure", "parameters": {"type": "object", "required": ["animal"],
                "properties": {"animal": {"enum": ["fox", "hare"]}}}}]
        }))),
        ("a tool's output" = (value = json!({
            "input": [
                {"role": "user", "content": "How large is a fox?"},
                {"type": "function_call", "call_id": "call_1", "name": "measure", "arguments": "{\"animal\": \"fox\"}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "70 cm"}
            ],
            "max_output_tokens": 8, "store": false
        }))),
        ("stream" = (value = json!({"input": "Tell me of a fox.", "max_output_tokens": 4, "stream": true})))
    )),
    responses(
        (status = 200, description = "The response. With `stream`: OpenAI's named events, from `response.created` to \
                                      `response.completed`, `response.incomplete`, or `error` and `response.failed`.",
            content((ResponseObject = "application/json"), (inline(ResponseEvents) = "text/event-stream"))),
        GenerationErrors,
        IdempotencyErrors,
        Error<501>,
        Error<507>
    )
)]
pub(super) async fn create_response(
    state: State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    generate::<ResponseRequest>(state, caller, headers, body).await
}

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
        GenerationErrors<MessageError>
    )
)]
pub(super) async fn create_message(
    state: State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    generate::<MessagesRequest>(state, caller, headers, body).await
}

/// Complete a text in llama.cpp's format
#[utoipa::path(
    post,
    path = "/completion",
    operation_id = "llamaCompletion",
    tag = "other formats",
    params(Prefer),
    request_body(content = LlamaRequest, examples(
        ("text" = (value = json!({"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}))),
        ("slot" = (value = json!({"prompt": "Once upon a time", "n_predict": 8, "id_slot": 0}))),
        ("probabilities" = (value = json!({"prompt": "Once", "n_predict": 2, "n_probs": 2, "seed": 7, "stop": ["."]}))),
        ("stream" = (value = json!({"prompt": "Once", "n_predict": 4, "stream": true})))
    )),
    responses(
        (status = 200, description = "The text. With `stream`: its pieces, the last one with `stop`.",
            content(
                (LlamaCompletions = "application/json"),
                (inline(LlamaEvents) = "text/event-stream")
            ),
            headers(
                ("etag" = String, description = "With `id_slot`: the version that the slot's session then has."),
                ("x-session-version" = String, description = "The same without quotes. In a stream it comes before the \
                                                              commit: a turn that fails makes no version.")
            )),
        GenerationErrors<LlamaError>,
        Error<409, LlamaError>,
        Error<501, LlamaError>,
        Error<507, LlamaError>
    )
)]
pub(super) async fn llama_completion(
    state: State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    generate::<LlamaRequest>(state, caller, headers, body).await
}
