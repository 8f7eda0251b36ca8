//! `/v1/responses` in the format of OpenAI's Responses API: a stored response is a snapshot, so to go on from it, or
//! to branch from it, costs the new tokens alone.
//!
//! What was read stays read: `instructions` are put before the input of their own request and are not put again by
//! those that go on from it, but the state that those begin with has seen them. Inputs are not kept, so there is
//! nothing to list.

mod events;
mod object;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use rand::Rng;
use serde::Serialize;
use tracing::debug;
use utoipa::ToSchema;

use self::events::{Before, Writer, replay};
use self::object::Object as ResponseObject;
use self::object::{Kind, Reasoning, ServiceTier, Status, TextOptions};
pub(in crate::api) use self::object::{Message, Object, TextPart};
use self::wire::ResponseRequest;
use crate::api::auth::context;
use crate::api::auth::owner::Caller;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::formats::openai::answer::now;
use crate::api::formats::openai::reading;
use crate::api::formats::openai::wire::{Format, body as json_body, parse};
use crate::api::openapi::literals::literals;
use crate::api::openapi::{
    Error, Events, GenerationErrors, Id, IdempotencyErrors, IdempotencyKey, StoreErrors, schemas,
};
use crate::api::request::origin::Origin;
use crate::api::request::validate::{Validated, validate};
use crate::api::run::account::Account;
use crate::api::run::idempotency::{Attempt, attempt};
use crate::api::run::sink;
use crate::api::run::texts::Texts;
use crate::api::run::{Keeping, OnDisconnect, Run};
use crate::api::state::{AppState, Served};
use crate::session::{Owner, ResponseId, Snapshot, StoreError, VersionId};

type ResponseEvents = Events<schemas::ResponseEvent, ErrorBody>;

/// Create a response
///
/// OpenAI's Responses API. A later response can continue from a stored one at the cost of its new tokens only.
/// `instructions` of an earlier response stay in effect, because the model has read them. Inputs are not stored.
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
pub(in crate::api) async fn create(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json_body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let attempt = attempt(&state, owner, &headers, Format::Responses.path(), &body).await?;
    let parsing = reading(&state, move || {
        let mut wire: ResponseRequest = parse(&body)?;
        wire.check().map(|()| wire)
    });
    let mut wire = parsing.await?;
    check_keep(&mut wire)?;
    let stream = wire.stream.unwrap_or(false);
    let ticket = match attempt {
        Attempt::Unmarked => None,
        Attempt::First(ticket) => Some(ticket),
        Attempt::Again(body) if stream => return Ok(sink::replayed(replay(&body), state.options().keep_alive)),
        Attempt::Again(body) => return Ok(whole(body)),
    };
    let id = ResponseId::new();
    let origin = origin(&state, owner, &id, &wire).await?;
    let before = origin
        .snapshot()
        .map_or_else(Before::default, |snapshot| Before { tokens: snapshot.tokens(), read: snapshot.read });
    let object = object(&id, &wire, &served);
    let (validated, origin) = {
        let served = Arc::clone(&served);
        let checking = reading(&state, move || {
            let wire = wire.into_generation()?;
            let validated = validate(Format::Responses, wire, &served, &origin);
            Ok((validated.map_err(|error| error.renamed("prompt", "input"))?, origin))
        });
        checking.await?
    };
    let Validated { requests, prompts, cached, seed, .. } = validated;
    debug!(seed, stream, "response starts");
    let texts = Texts::new(Account::new(&prompts, cached), served.engine.submit_all(requests)?);
    let (dialect, keeping) = (Box::new(Writer::new(object, before)), origin.keeping(None));
    Run { state, served, texts, dialect, keeping, on_disconnect: OnDisconnect::Rollback, ticket }.answer(stream).await
}

/// Refuses to keep a response, or to go on from one, for a key that does not open what is kept. Where nothing is said,
/// such a key's responses are not.
fn check_keep(wire: &mut ResponseRequest) -> Result<(), ApiError> {
    if wire.previous_response_id.is_some() {
        context::check_may_store("previous_response_id")?;
    }
    if *wire.store.get_or_insert_with(context::may_store) {
        context::check_may_store("store")?;
    }
    Ok(())
}

/// Where a response begins, and whether it is kept.
async fn origin(state: &AppState, owner: Owner, id: &ResponseId, wire: &ResponseRequest) -> Result<Origin, ApiError> {
    let previous = match &wire.previous_response_id {
        Some(previous) => Some(conversation(state, owner, previous).await?),
        None => None,
    };
    let store = wire.store.unwrap_or(true);
    if store {
        // Before anything is computed for it.
        state.store()?.admit(owner).await?;
    }
    let (snapshot, parent) = match previous {
        Some((snapshot, version)) => (snapshot, Some(version)),
        // As any request for text, whose beginning may be known.
        None if !store => return Ok(Origin::Plain { owner }),
        None => (Arc::new(Snapshot::empty(rand::rng().random())), None),
    };
    let keeping = if store { Keeping::Response { owner, id: id.clone(), parent } } else { Keeping::Nothing(owner) };
    Ok(Origin::Response { snapshot, keeping: Box::new(keeping) })
}

/// The conversation that ends with a response.
async fn conversation(state: &AppState, owner: Owner, id: &str) -> Result<(Arc<Snapshot>, VersionId), ApiError> {
    let param = "previous_response_id";
    let id = response_id(id, param)?;
    let store = state.store()?;
    let version = store.response(owner, &id).await.map_err(|error| not_found(error, param))?.1;
    let snapshot = store.response_snapshot(owner, &id).await.map_err(|error| not_found(error, param))?.0;
    Ok((snapshot, version))
}

/// The response as it is when it begins.
fn object(id: &ResponseId, wire: &ResponseRequest, served: &Served) -> Object {
    Object {
        id: id.to_string(),
        kind: Kind::Response,
        created_at: now(),
        completed_at: None,
        status: Status::InProgress,
        background: false,
        error: None,
        incomplete_details: None,
        instructions: wire.instructions.clone(),
        max_output_tokens: wire.max_output_tokens,
        model: served.name.clone(),
        output: Vec::new(),
        parallel_tool_calls: wire.parallel_tool_calls.unwrap_or(true),
        previous_response_id: wire.previous_response_id.clone(),
        reasoning: Reasoning::default(),
        service_tier: ServiceTier::default(),
        store: wire.store.unwrap_or(true),
        temperature: wire.temperature.map_or(served.sampling.temperature, |temperature| temperature as f32),
        text: TextOptions { format: wire.format.clone() },
        tool_choice: wire.tool_choice.unwrap_or_default(),
        tools: Vec::new(),
        top_logprobs: 0,
        top_p: wire.top_p.map_or(served.sampling.top_p, |top_p| top_p as f32),
        truncation: wire.truncation.unwrap_or_default(),
        usage: None,
        user: wire.user.clone(),
        metadata: wire.metadata.clone().unwrap_or_default(),
        held_text: String::new(),
    }
}

/// Retrieve a stored response
#[utoipa::path(
    get,
    path = "/v1/responses/{id}",
    operation_id = "retrieveResponse",
    tag = "text",
    params(Id, ("stream" = Option<String>, Query, nullable = false, pattern = "^false$", description = "Not supported: must be false.")),
    responses((status = 200, description = "The response.", body = ResponseObject), StoreErrors)
)]
pub(in crate::api) async fn retrieve(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    for (name, value) in query.iter().flat_map(|query| query.split('&')).filter_map(|pair| pair.split_once('=')) {
        let name = name.split(['[', '%']).next().unwrap_or(name);
        if ["include", "starting_after"].contains(&name) || (name == "stream" && value != "false") {
            let message = format!("{name} must be absent: a response is read whole, as it was given");
            return Err(ApiError::invalid(Some(name), message));
        }
    }
    let body = state.store()?.response(owner, &id).await.map_err(|error| not_found(error, "id"))?.0;
    Ok(whole(body))
}

literals!(ResponseKind = "response");

/// A response that was deleted.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct DeletedResponse {
    id: String,
    #[schema(inline)]
    object: ResponseKind,
    deleted: bool,
}

/// Delete a stored response
#[utoipa::path(
    delete,
    path = "/v1/responses/{id}",
    operation_id = "deleteResponse",
    tag = "text",
    params(Id),
    responses((status = 200, description = "The response is deleted.", body = DeletedResponse), StoreErrors)
)]
pub(in crate::api) async fn delete(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<DeletedResponse>, ApiError> {
    let id = path_id(id)?;
    state.store()?.delete_response(owner, &id).await.map_err(|error| not_found(error, "id"))?;
    Ok(Json(DeletedResponse { id: id.to_string(), object: ResponseKind, deleted: true }))
}

fn whole(body: impl IntoResponse) -> Response {
    let mut response = body.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

fn path_id(id: Result<Path<String>, PathRejection>) -> Result<ResponseId, ApiError> {
    let Path(id) = id.map_err(|rejection| ApiError::invalid(Some("id"), rejection.to_string()))?;
    response_id(&id, "id")
}

/// A response's id that came from outside; one that is none answers as one that is not there.
fn response_id(id: &str, param: &str) -> Result<ResponseId, ApiError> {
    ResponseId::parse(id).ok_or_else(|| ApiError::missing(param, "response"))
}

/// Whatever of a response is not there, it is the response that is missing.
fn not_found(error: StoreError, param: &str) -> ApiError {
    match error {
        StoreError::NotFound { .. } => ApiError::missing(param, "response"),
        error => error.into(),
    }
}
