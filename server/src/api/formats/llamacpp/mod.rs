//! llama.cpp's own routes: `/completion`, `/props`, `/slots`; what they say beside OpenAI's is said as its clients
//! read it.

mod answer;
mod biases;
mod prompts;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use self::answer::{Chunk, Completions, Whole};
use self::wire::CompletionRequest;

use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::foreign;
use crate::api::openapi::{Error, Events, GenerationErrors};
use crate::api::state::{AppState, Served};

type CompletionEvents = Events<Chunk<'static>, Whole>;

/// Complete a text in llama.cpp's format
#[utoipa::path(
    post,
    path = "/completion",
    operation_id = "llamaCompletion",
    tag = "other formats",
    request_body(content = CompletionRequest, examples(
        ("text" = (value = json!({"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}))),
        ("probabilities" = (value = json!({"prompt": "Once", "n_predict": 2, "n_probs": 2, "seed": 7, "stop": ["."]}))),
        ("stream" = (value = json!({"prompt": "Once", "n_predict": 4, "stream": true})))
    )),
    responses(
        (status = 200, description = "The text. With `stream`: its pieces, the last one with `stop`.",
            content(
                (Completions = "application/json"),
                (inline(CompletionEvents) = "text/event-stream")
            )),
        GenerationErrors<LlamaError>
    )
)]
pub(in crate::api) async fn completion(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    foreign::create::<wire::Settings>(state, owner, &headers, body).await
}

/// What llama.cpp's clients ask about the server.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Props {
    #[schema(value_type = Object)]
    default_generation_settings: Value,
    total_slots: usize,
    model_alias: String,
    model_path: String,
    modalities: Modalities,
    chat_template: String,
    bos_token: String,
    eos_token: String,
    build_info: &'static str,
    is_sleeping: bool,
}

#[derive(Serialize, ToSchema)]
struct Modalities {
    vision: bool,
    audio: bool,
}

/// A slot of the engine.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Slot {
    id: usize,
    n_ctx: usize,
    speculative: bool,
    is_processing: bool,
    /// Size of the slot's state in bytes.
    state_bytes: u64,
}

/// Properties of the server in llama.cpp's format
#[utoipa::path(
    get,
    path = "/props",
    operation_id = "props",
    tag = "other formats",
    responses((status = 200, description = "The properties.", body = Props), Error<503, LlamaError>)
)]
pub(in crate::api) async fn props(State(state): State<AppState>) -> Result<Json<Props>, ApiError> {
    let served = Arc::clone(state.ready()?);
    let token = |id: Option<&u32>| id.and_then(|id| served.tokenizer.special(*id)).unwrap_or_default().to_owned();
    let params = wire::Settings::default_of(&served);
    Ok(Json(Props {
        default_generation_settings: json!({"n_ctx": served.limits.context(), "params": params}),
        total_slots: served.engine.slots(),
        model_alias: served.name.clone(),
        // The path on the server's disk stays private.
        model_path: served.name.clone(),
        modalities: Modalities { vision: false, audio: false },
        chat_template: served.template.as_ref().map_or_else(String::new, |template| template.source().to_owned()),
        bos_token: token(served.tokenizer.begin().first()),
        eos_token: token(served.tokenizer.eos().first()),
        build_info: concat!("tidegate-", env!("CARGO_PKG_VERSION")),
        is_sleeping: false,
    }))
}

/// The slots in llama.cpp's format, without the requests in them
#[utoipa::path(
    get,
    path = "/slots",
    operation_id = "slots",
    tag = "other formats",
    params(("fail_on_no_slot" = inline(Value), Query, description = "`1`: respond with 503 if no slot is free.")),
    responses((status = 200, description = "The slots.", body = Vec<Slot>), Error<503, LlamaError>)
)]
pub(in crate::api) async fn slots(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<Vec<Slot>>, ApiError> {
    let served = state.ready()?;
    let (slots, running) = (served.engine.slots(), served.engine.stats().running);
    let wants_one = query.iter().flat_map(|query| query.split('&')).any(|pair| pair == "fail_on_no_slot=1");
    if wants_one && running >= slots as u64 {
        let message = format!("all {slots} slots are in use");
        return Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "no_slot", message));
    }
    Ok(Json((0..slots).map(|id| slot(id, (id as u64) < running, served)).collect()))
}

fn slot(id: usize, is_processing: bool, served: &Served) -> Slot {
    let (n_ctx, state_bytes) = (served.limits.context(), served.state_bytes);
    Slot { id, n_ctx, speculative: false, is_processing, state_bytes }
}

/// Infilling: not supported
#[utoipa::path(
    post,
    path = "/infill",
    operation_id = "infill",
    tag = "other formats",
    responses((status = 501, description = "Not supported.", body = LlamaError))
)]
pub(in crate::api) async fn infill() -> ApiError {
    let message = "the model has no tokens for a text before and a text after: only what follows is written";
    ApiError::request(StatusCode::NOT_IMPLEMENTED, None, Some("not_supported"), message)
}

/// An error in this format.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LlamaError {
    error: ErrorDetails,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LlamaErrorDetails)]
struct ErrorDetails {
    /// The HTTP status.
    code: u16,
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[schema(required)]
    param: Option<String>,
}

/// An error as this format says it.
pub(in crate::api) fn refusal(error: &ApiError) -> Value {
    let status = error.status().as_u16();
    let kind = match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        429 => "rate_limit_error",
        501 => "not_supported_error",
        503 => "unavailable_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let (message, param) = (error.message().to_owned(), error.param().map(str::to_owned));
    let error = ErrorDetails { code: status, message, kind, param };
    serde_json::to_value(LlamaError { error }).expect("strings and numbers become JSON")
}
