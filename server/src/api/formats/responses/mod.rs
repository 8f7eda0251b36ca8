//! `/v1/responses` in the format of OpenAI's Responses API. A stored response is a snapshot, so continuing it or
//! branching from it costs only the new tokens.
//!
//! `instructions` come before the input of their own request. A request that continues its response does not repeat
//! them, but starts from a state that has read them. Inputs are not stored, so they cannot be listed. Tools apply only
//! to their own request: a request that continues its response must send them again if the answer may call them.

mod encoder;
mod events;
mod input;
mod items;
mod object;
mod output;
mod wire;

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use rand::Rng;
use serde::Serialize;
use utoipa::ToSchema;

use self::encoder::{Context, ResponseEncoder, replay};
pub(in crate::api) use self::events::Event;
use self::items::Status;
use self::object::Object as ResponseObject;
pub(in crate::api) use self::object::Object;
use self::object::{Kind, Reasoning, ServiceTier, TextFormat, TextOptions};
pub(in crate::api) use self::wire::ResponseRequest;
use super::format::{Converted, Format};
use super::openai::answer::now;
use crate::api::auth::context;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::openapi::literals::literals;
use crate::api::openapi::{Id, StoreErrors};
use crate::api::request::ValidRequest;
use crate::api::request::continuation::{CommitPlan, Continuation, SessionParameters};
use crate::api::run::answer::AnswerSplitter;
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::select::Model;
use crate::api::state::{AppState, Served};
use crate::session::{Owner, ResponseId, Snapshot, StoreError, VersionId};

/// What the encoder needs to know about a request.
pub(in crate::api) struct Options {
    /// The response at its start.
    object: Object,
    /// Whether to store the response; `None` if the request does not say.
    store: Option<bool>,
}

impl Format for ResponseRequest {
    type Options = Options;

    const IDEMPOTENT_PATH: Option<&'static str> = Some("/v1/responses");

    fn convert(mut self, served: &Served) -> Result<Converted<Options>, ApiError> {
        let (format, asked, ignored) = self.check()?;
        let options = Options { object: new_object(&self, format, served), store: self.store };
        let stream = self.stream.unwrap_or(false);
        let request = self.convert(asked)?;
        Ok(Converted { request, session: SessionParameters::default(), stream, ignored, options })
    }

    async fn continuation(
        options: &mut Options,
        _: SessionParameters,
        state: &AppState,
        _: &Arc<Served>,
        owner: Owner,
        _: &HeaderMap,
    ) -> Result<Continuation, ApiError> {
        continuation(options, state, owner).await
    }

    fn encoder(Options { object, .. }: Options, request: &ValidRequest, _: bool) -> Box<dyn EventEncoder> {
        let context = request.base.as_deref().map_or_else(Context::default, Context::of);
        Box::new(ResponseEncoder::new(object, context, AnswerSplitter::of(request, 0)))
    }

    fn replay(_: &Options, body: &str) -> Vec<StreamEvent> {
        replay(body)
    }
}

/// Finds the conversation that a response continues, and decides whether the response is stored. An API key without the
/// scope for sessions can neither store nor continue a response; by default its responses are not stored.
async fn continuation(options: &mut Options, state: &AppState, owner: Owner) -> Result<Continuation, ApiError> {
    let object = &mut options.object;
    if object.previous_response_id.is_some() {
        context::check_may_store("previous_response_id")?;
    }
    let store = match options.store {
        Some(true) => context::check_may_store("store").map(|()| true)?,
        Some(false) => false,
        None => context::may_store(),
    };
    object.store = store;
    let previous = match &object.previous_response_id {
        Some(previous) => Some(conversation(state, owner, previous).await?),
        None => None,
    };
    if store {
        // The store must admit the response before anything is computed for it.
        state.store()?.admit(owner).await?;
    }
    let (snapshot, parent) = match previous {
        Some((snapshot, version)) => (snapshot, Some(version)),
        // Like any text request, whose prompt may begin with a known prefix.
        None if !store => return Ok(Continuation::none(owner)),
        None => (Arc::new(Snapshot::empty(rand::rng().random())), None),
    };
    let id = response_id(&object.id, "id")?;
    let plan = if store { CommitPlan::Response { owner, id, parent } } else { CommitPlan::Nothing(owner) };
    Ok(Continuation::of(snapshot, plan))
}

/// Returns the conversation that a request continues, if any.
pub(super) async fn base(
    wire: &ResponseRequest,
    state: &AppState,
    owner: Owner,
) -> Result<Option<Arc<Snapshot>>, ApiError> {
    let Some(previous) = &wire.previous_response_id else { return Ok(None) };
    context::check_may_store("previous_response_id")?;
    Ok(Some(conversation(state, owner, previous).await?.0))
}

/// Returns the conversation that ends with a stored response, and its version.
async fn conversation(state: &AppState, owner: Owner, id: &str) -> Result<(Arc<Snapshot>, VersionId), ApiError> {
    let param = "previous_response_id";
    let id = response_id(id, param)?;
    let store = state.store()?;
    let version = store.response(owner, &id).await.map_err(|error| not_found(error, param))?.1;
    let snapshot = store.response_snapshot(owner, &id).await.map_err(|error| not_found(error, param))?.0;
    Ok((snapshot, version))
}

/// Creates the response object as it is at the start.
fn new_object(wire: &ResponseRequest, format: TextFormat, served: &Served) -> Object {
    Object {
        id: ResponseId::new().to_string(),
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
        text: TextOptions { format },
        tool_choice: wire.tool_choice.clone().unwrap_or_else(|| "auto".into()),
        tools: wire.tools.clone().unwrap_or_default(),
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
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let id = path_id(id)?;
    for (name, value) in query.iter().flat_map(|query| query.split('&')).filter_map(|pair| pair.split_once('=')) {
        let name = name.split(['[', '%']).next().unwrap_or(name);
        if ["include", "starting_after"].contains(&name) || (name == "stream" && value != "false") {
            let message = format!("{name} must be absent: a stored response is returned in one piece");
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
    Model(state): Model,
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

/// Parses a response's id from a client; a malformed one is reported as missing.
fn response_id(id: &str, param: &str) -> Result<ResponseId, ApiError> {
    ResponseId::parse(id).ok_or_else(|| ApiError::missing(param, "response"))
}

/// Converts an error of the store. Whichever part of a response is missing, the client is told that the response is.
fn not_found(error: StoreError, param: &str) -> ApiError {
    match error {
        StoreError::NotFound { .. } => ApiError::missing(param, "response"),
        error => error.into(),
    }
}
