//! llama.cpp's own routes: `/completion`, `/infill`, `/props` and `/slots`.

mod biases;
mod encoder;
mod prompts;
mod settings;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use serde_json::{Value, json};

use self::settings::Settings;
pub(in crate::api) use self::wire::LlamaRequest;
use crate::api::error::ApiError;
use crate::api::openapi::{Error, schemas};
use crate::api::state::{AppState, Served};

/// Properties of the server in llama.cpp's format
#[utoipa::path(
    get,
    path = "/props",
    operation_id = "props",
    tag = "other formats",
    responses((status = 200, description = "The properties.", body = schemas::Props), Error<503, schemas::LlamaError>)
)]
pub(in crate::api) async fn props(State(state): State<AppState>) -> Result<Json<Value>, ApiError> {
    let served = Arc::clone(state.ready()?);
    let token = |id: Option<&u32>| id.and_then(|id| served.tokenizer.special(*id)).unwrap_or_default().to_owned();
    Ok(Json(json!({
        "default_generation_settings": {
            "n_ctx": served.limits.context(),
            "params": Settings::defaults(&served),
        },
        "total_slots": served.engine.slots(),
        "model_alias": served.name,
        // Clients need not know the path on the server's disk.
        "model_path": served.name,
        "modalities": {"vision": false, "audio": false},
        "chat_template": served.template.as_ref().map_or("", |template| template.source()),
        "bos_token": token(served.tokenizer.begin().first()),
        "eos_token": token(served.tokenizer.eos().first()),
        "build_info": concat!("tidegate-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// The slots in llama.cpp's format, without the requests in them
#[utoipa::path(
    get,
    path = "/slots",
    operation_id = "slots",
    tag = "other formats",
    params(("fail_on_no_slot" = inline(Value), Query, description = "`1`: respond with 503 if no slot is free.")),
    responses((status = 200, description = "The slots.", body = schemas::Slots), Error<503, schemas::LlamaError>)
)]
pub(in crate::api) async fn slots(
    State(state): State<AppState>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, ApiError> {
    let served = state.ready()?;
    let (slots, running) = (served.engine.slots(), served.engine.stats().running);
    let wants_one = query.iter().flat_map(|query| query.split('&')).any(|pair| pair == "fail_on_no_slot=1");
    if wants_one && running >= slots as u64 {
        let message = format!("all {slots} slots are in use");
        return Err(ApiError::server(StatusCode::SERVICE_UNAVAILABLE, "no_slot", message));
    }
    Ok(Json((0..slots).map(|id| slot(id, (id as u64) < running, served)).collect()))
}

fn slot(id: usize, is_processing: bool, served: &Served) -> Value {
    json!({
        "id": id,
        "n_ctx": served.limits.context(),
        "speculative": false,
        "is_processing": is_processing,
        "state_bytes": served.state_bytes,
    })
}

/// Infilling: not supported
#[utoipa::path(
    post,
    path = "/infill",
    operation_id = "infill",
    tag = "other formats",
    responses((status = 501, description = "Not supported.", body = schemas::LlamaError))
)]
pub(in crate::api) async fn infill() -> ApiError {
    let message = "infill is not supported: the model has no tokens that mark a prefix and a suffix";
    ApiError::request(StatusCode::NOT_IMPLEMENTED, None, Some("not_supported"), message)
}

/// The body of an error.
pub(in crate::api) fn error_body(error: &ApiError) -> Value {
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
    let param = &error.body()["error"]["param"];
    json!({"error": {"code": status, "message": error.message(), "type": kind, "param": param}})
}
