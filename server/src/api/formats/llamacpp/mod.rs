//! llama.cpp's own routes: `/completion`, `/infill`, `/props` and `/slots`.

mod biases;
mod encoder;
mod prompts;
mod settings;
mod slot;
pub(in crate::api) mod slots;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::extract::RawQuery;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

pub(in crate::api) use self::encoder::{Completions, Event};
use self::settings::Settings;
pub(in crate::api) use self::wire::LlamaRequest;
use crate::api::error::ApiError;
use crate::api::openapi::Error;
use crate::api::select::Model;
use crate::text::ChatTemplate;

/// Properties of the server, as llama.cpp's clients ask for them.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Props {
    default_generation_settings: DefaultSettings,
    total_slots: usize,
    model_alias: String,
    /// The model's name instead of a path: clients need not know the path on the server's disk.
    model_path: String,
    modalities: Modalities,
    chat_template: String,
    /// The template for requests whose answer may call tools, if they have their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_tool_use: Option<String>,
    bos_token: String,
    eos_token: String,
    build_info: &'static str,
    is_sleeping: bool,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LlamaDefaults)]
struct DefaultSettings {
    /// The maximum length of a prompt and its answer together, in tokens.
    n_ctx: usize,
    params: Settings,
}

#[derive(Serialize, ToSchema)]
struct Modalities {
    vision: bool,
    audio: bool,
}

/// A place for one running request.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct Slot {
    id: usize,
    /// The maximum length of a prompt and its answer together, in tokens.
    n_ctx: usize,
    speculative: bool,
    is_processing: bool,
    state_bytes: u64,
}

/// Properties of the server in llama.cpp's format
#[utoipa::path(
    get,
    path = "/props",
    operation_id = "props",
    tag = "other formats",
    responses((status = 200, description = "The properties.", body = Props), Error<503, ErrorBody<'_>>)
)]
pub(in crate::api) async fn props(Model(state): Model) -> Result<Json<Props>, ApiError> {
    let served = Arc::clone(state.ready()?);
    let token = |id: Option<&u32>| id.and_then(|id| served.tokenizer.special(*id)).unwrap_or_default().to_owned();
    let params = Settings::defaults(&served);
    let template = served.template.as_deref();
    Ok(Json(Props {
        default_generation_settings: DefaultSettings { n_ctx: served.limits.context(), params },
        total_slots: served.engine.slots(),
        model_alias: served.name.clone(),
        model_path: served.name.clone(),
        modalities: Modalities { vision: false, audio: false },
        chat_template: template.map_or_else(String::new, |template| template.source().into()),
        chat_template_tool_use: template.and_then(ChatTemplate::source_with_tools).map(Into::into),
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
    responses((status = 200, description = "The slots.", body = Vec<Slot>), Error<503, ErrorBody<'_>>)
)]
pub(in crate::api) async fn slots(Model(state): Model, RawQuery(query): RawQuery) -> Result<Json<Vec<Slot>>, ApiError> {
    let served = state.ready()?;
    let (slots, running) = (served.engine.slots(), served.engine.stats().running);
    let wants_one = query.iter().flat_map(|query| query.split('&')).any(|pair| pair == "fail_on_no_slot=1");
    if wants_one && running >= slots as u64 {
        let message = format!("all {slots} slots are in use");
        return Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "no_slot", message));
    }
    let slot = |id| Slot {
        id,
        n_ctx: served.limits.context(),
        speculative: false,
        is_processing: (id as u64) < running,
        state_bytes: served.state_bytes,
    };
    Ok(Json((0..slots).map(slot).collect()))
}

/// Infilling: not supported
#[utoipa::path(
    post,
    path = "/infill",
    operation_id = "infill",
    tag = "other formats",
    responses((status = 501, description = "Not supported.", body = ErrorBody))
)]
pub(in crate::api) async fn infill() -> ApiError {
    let message = "infill is not supported: the model has no tokens that mark a prefix and a suffix";
    ApiError::request(StatusCode::NOT_IMPLEMENTED, None, Some("not_supported"), message)
}

/// The body of an error.
#[derive(Serialize, ToSchema)]
#[schema(as = LlamaError)]
pub(in crate::api) struct ErrorBody<'a> {
    error: ErrorDetails<'a>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = LlamaErrorDetails)]
struct ErrorDetails<'a> {
    /// The HTTP status.
    code: u16,
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    /// The parameter at fault, if the error is about one.
    #[schema(required)]
    param: Option<&'a str>,
}

impl<'a> ErrorBody<'a> {
    pub(in crate::api) fn new(error: &'a ApiError) -> Self {
        let code = error.status().as_u16();
        let kind = match code {
            400 if error.code() == Some("context_length_exceeded") => "exceed_context_size_error",
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            501 => "not_supported_error",
            503 => "unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        Self { error: ErrorDetails { code, message: error.message(), kind, param: error.param() } }
    }
}
