//! New sessions and appends: text that the model reads without generating.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rand::Rng;

use super::http::{json_body, path_id, replay, to_completion, to_json};
use super::wire::{AppendRequest, Appended, CreateRequest, Session, label, metadata, ttl};
use crate::api::auth::context;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::json::parse;
use crate::api::formats::openai::answer::now;
use crate::api::formats::openai::wire::{ChatMessage, Seed, messages};
use crate::api::openapi::{BodyErrors, Error, Id, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, StoreErrors};
use crate::api::request::ParameterNames;
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::{if_match, version_id, wait};
use crate::api::request::prompt::{encode_closed_messages, encode_text};
use crate::api::run::retry::{Attempt, attempt};
use crate::api::state::{AppState, Served};
use crate::engine::{self, Event, Failure, Request, RequestParameters, Snapshots};
use crate::session::{self, NewSession, Snapshot, Start, TurnNote, VersionId};

/// The text of a request, in one of its three forms.
enum Input {
    Text(String),
    Ids(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

impl Input {
    /// The form that is given; `None` without any.
    fn new(
        text: Option<String>,
        tokens: Option<Vec<u32>>,
        messages: Option<Vec<ChatMessage>>,
    ) -> Result<Option<Self>, ApiError> {
        match (text, tokens, messages) {
            (None, None, None) => Ok(None),
            (Some(text), None, None) => Ok(Some(Self::Text(text))),
            (None, Some(ids), None) => Ok(Some(Self::Ids(ids))),
            (None, None, Some(messages)) => Ok(Some(Self::Messages(messages))),
            _ => Err(ApiError::invalid(Some("text"), "text, tokens and messages must not be given together")),
        }
    }

    fn param(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Ids(_) => "tokens",
            Self::Messages(_) => "messages",
        }
    }

    fn ids(self, served: &Served, base: &Snapshot) -> Result<Vec<u32>, ApiError> {
        let param = self.param();
        let ids = match self {
            Self::Text(text) => encode_text(&text, param, served, Some(base))?,
            Self::Ids(ids) => ids,
            Self::Messages(given) => encode_closed_messages(&messages(given, param)?, param, served, base)?,
        };
        if ids.is_empty() {
            return Err(ApiError::invalid(Some(param), format!("{param} must not be empty")));
        }
        Ok(ids)
    }
}

/// Create a session
///
/// With at most one of `text`, `tokens`, `messages`, `version` and `snapshot`; without any, the session is empty.
#[utoipa::path(
    post,
    path = "/v1/sessions",
    operation_id = "createSession",
    tag = "sessions",
    params(IdempotencyKey),
    request_body(content = Option<CreateRequest>, examples(
        ("empty" = (value = json!({}))),
        ("with a text" = (value = json!({
            "text": "Once upon a time there was", "metadata": {"tale": "fox"}, "ttl_seconds": 3600
        })))
    )),
    responses(
        (status = 201, description = "The session.", body = Session,
            headers(("etag" = String, description = "The session's version."))),
        StoreErrors,
        BodyErrors,
        IdempotencyErrors,
        Error<507>
    )
)]
pub(super) async fn create(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = Arc::clone(state.ready()?);
    let bytes = json_body(&state, &headers, bytes)?;
    let ticket = match attempt(&state, owner, &headers, "/v1/sessions", &bytes).await? {
        Attempt::Retry(body) => return Ok(replay(StatusCode::CREATED, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let mut request: CreateRequest = run_blocking(&state, move || parse(&bytes)).await?;
    let (metadata, ttl) =
        (request.metadata.take().map(metadata).transpose()?, request.ttl_seconds.map(ttl).transpose()?);
    let label = label(request.label.take())?;
    let store = state.store()?.clone();
    if request.text.is_some() || request.tokens.is_some() || request.messages.is_some() || request.snapshot.is_some() {
        // Refuse before computing anything.
        store.admit(owner).await?;
    }
    let start = start(&state, &served, request).await?;
    let new = NewSession { start, metadata: metadata.unwrap_or_default(), ttl, label };
    let state_bytes = served.state_bytes;
    let body = move |session: &session::Session| to_json(&Session::new(session, state_bytes));
    let creating = async move {
        let session = store.create_once(owner, new, ticket.as_ref().map(|ticket| ticket.promise(body))).await?;
        Ok(replay(StatusCode::CREATED, body(&session)))
    };
    to_completion(&state, creating).await
}

/// What a new session starts from: at most one of text, tokens, messages, version and snapshot.
async fn start(state: &AppState, served: &Arc<Served>, request: CreateRequest) -> Result<Start, ApiError> {
    let CreateRequest { text, tokens, messages, version, snapshot, seed, .. } = request;
    let input = Input::new(text, tokens, messages)?;
    let given = usize::from(input.is_some()) + usize::from(version.is_some()) + usize::from(snapshot.is_some());
    if given > 1 {
        let message = "text, tokens, messages, version and snapshot must not be given together";
        return Err(ApiError::invalid(Some("version"), message));
    }
    if seed.is_some() && (version.is_some() || snapshot.is_some()) {
        let message = "seed must be absent with version or snapshot, which have their own";
        return Err(ApiError::invalid(Some("seed"), message));
    }
    if let Some(id) = version {
        return Ok(Start::Version(version_id(&id, "version")?));
    }
    if let Some(encoded) = snapshot {
        let served = Arc::clone(served);
        return run_blocking(state, move || {
            let invalid = |error: String| ApiError::invalid(Some("snapshot"), format!("snapshot: {error}"));
            let bytes = BASE64.decode(encoded).map_err(|error| invalid(format!("must be base64: {error}")))?;
            let snapshot = served.codec.import(&bytes).map_err(|error| invalid(error.to_string()))?;
            Ok(Start::Snapshot(Arc::new(snapshot)))
        })
        .await;
    }
    let seed = seed.map_or_else(|| rand::rng().random(), Seed::bits);
    let Some(input) = input else { return Ok(Start::Empty { seed }) };
    let (_, snapshot) = read(state, served, Arc::new(Snapshot::empty(seed)), input).await?;
    Ok(Start::Snapshot(snapshot))
}

/// Append to a session
///
/// The model reads one of `text`, `tokens` and `messages`; it generates nothing.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/append",
    operation_id = "appendToSession",
    tag = "sessions",
    params(Id, IdempotencyKey, IfMatch, Prefer),
    request_body(content = AppendRequest, examples(
        ("text" = (value = json!({"text": " And then", "label": "more"}))),
        ("token ids" = (value = json!({"tokens": [5, 6]})))
    )),
    responses(
        (status = 200, description = "The session.", body = Appended,
            headers(("etag" = String, description = "The session's version."))),
        StoreErrors,
        BodyErrors,
        IdempotencyErrors,
        Error<412>,
        Error<507>
    )
)]
pub(super) async fn append(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = Arc::clone(state.ready()?);
    let (id, bytes) = (path_id(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/append");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Retry(body) => return Ok(replay(StatusCode::OK, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let request: AppendRequest = run_blocking(&state, move || parse(&bytes)).await?;
    let label = label(request.label)?;
    let missing = || ApiError::invalid(Some("text"), "one of text, tokens and messages must be given");
    let input = Input::new(request.text, request.tokens, request.messages)?.ok_or_else(missing)?;

    let wait = wait(&headers)?;
    let permit = if wait.is_zero() { None } else { Some(state.waiter()?) };
    // Dropping the turn before its commit, on an error or a disconnect, leaves the session unchanged.
    let turn = state.store()?.begin(owner, &id, if_match(&headers)?, wait).await?;
    drop(permit);
    let (appended, snapshot) = read(&state, &served, Arc::clone(turn.head()), input).await?;
    let version = VersionId::new();
    let body = body(turn.session(), &version, &snapshot, label.clone(), appended, &served);
    let (prompt_tokens, kind) = (appended as u64, "append".to_owned());
    let note = TurnNote { label, prompt_tokens, completion_tokens: 0, kind };
    let committing = async move {
        turn.commit(snapshot, note, ticket.as_ref().map(|ticket| ticket.receipt(&body)), version).await?;
        Ok(replay(StatusCode::OK, body))
    };
    to_completion(&state, committing).await
}

/// The response to an append. It is created before the commit, which stores it in the receipt.
fn body(
    before: &session::Session,
    version: &VersionId,
    snapshot: &Snapshot,
    label: Option<String>,
    appended: usize,
    served: &Served,
) -> String {
    let now = now();
    let head = session::Version {
        id: version.clone(),
        parent: Some(before.head.id.clone()),
        tokens: snapshot.tokens(),
        label,
        ..before.head.clone()
    };
    let expires = before.ttl.map(|ttl| now + ttl);
    let session = session::Session { head, updated: now, expires, in_use: false, ..before.clone() };
    let appended_tokens = appended as u64;
    to_json(&Appended { appended_tokens, session: Session::new(&session, served.state_bytes) })
}

/// Reads `input` after `base`; returns its number of tokens and the new snapshot.
async fn read(
    state: &AppState,
    served: &Arc<Served>,
    base: Arc<Snapshot>,
    input: Input,
) -> Result<(usize, Arc<Snapshot>), ApiError> {
    let param = input.param();
    let request = {
        let (served, base) = (Arc::clone(served), Arc::clone(&base));
        run_blocking(state, move || {
            let prompt = input.ids(&served, &base)?;
            let snapshots = Snapshots { prompt: false, end: true };
            let parameters = RequestParameters {
                start: engine::Start::Session(base),
                prompt,
                snapshots,
                ..RequestParameters::default()
            };
            let names = ParameterNames::openai(param, "max_tokens");
            Request::new(parameters, &served.limits).map_err(|error| names.error(&error))
        })
        .await?
    };
    let tokens = request.prompt_tokens();
    let mut events = served.engine.submit(request)?;
    if let Some(auth) = context::current() {
        auth.charge(tokens);
    }
    loop {
        match events.next().await.unwrap_or(Event::Failed(Failure::Internal)) {
            Event::Finished(finish) => {
                return finish.snapshot.map(|snapshot| (tokens, snapshot)).ok_or_else(ApiError::internal);
            }
            Event::Failed(failure) => return Err(failure.into()),
            Event::Read(_) | Event::PromptLogprobs(_) | Event::Delta(_) => {}
        }
    }
}
