//! Text that is read into a conversation without an answer: new sessions, and more for those that are there.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rand::Rng;
use serde_json::Value;

use super::wire::{AppendRequest, CreateRequest, label, metadata, ttl};
use super::{again, json_body, json_of, named, unbroken};
use crate::api::answer::now;
use crate::api::auth::context;
use crate::api::error::ApiError;
use crate::api::generate::reading;
use crate::api::idempotency::{Attempt, attempt};
use crate::api::origin::{if_match, version_id, wait};
use crate::api::auth::owner::Caller;
use crate::api::prompt::{closed_to_ids, messages_to_closed_ids, text_to_ids};
use crate::api::state::{AppState, Served};
use crate::api::wire::{ChatMessage, Seed, parse};
use crate::engine::{Event, Failure, Keep, Request, RequestParameters, Start as Origin};
use crate::session::{NewSession, Session, Snapshot, Start, TurnNote, Version, VersionId};

/// The text of a request, in the one form that it has.
enum Text {
    Plain(String),
    Ids(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

impl Text {
    /// The one form that is there.
    fn only(
        text: Option<String>,
        tokens: Option<Vec<u32>>,
        messages: Option<Vec<ChatMessage>>,
    ) -> Result<Option<Self>, ApiError> {
        match (text, tokens, messages) {
            (None, None, None) => Ok(None),
            (Some(text), None, None) => Ok(Some(Self::Plain(text))),
            (None, Some(ids), None) => Ok(Some(Self::Ids(ids))),
            (None, None, Some(messages)) => Ok(Some(Self::Messages(messages))),
            _ => Err(ApiError::invalid(Some("text"), "text, tokens and messages must not be given together")),
        }
    }

    fn param(&self) -> &'static str {
        match self {
            Self::Plain(_) => "text",
            Self::Ids(_) => "tokens",
            Self::Messages(_) => "messages",
        }
    }

    fn ids(self, served: &Served, base: &Snapshot) -> Result<Vec<u32>, ApiError> {
        let param = self.param();
        let ids = match self {
            Self::Plain(text) => text_to_ids(&text, param, served, Some(base))?,
            Self::Ids(ids) => ids,
            Self::Messages(messages) if base.tokens() == 0 => closed_to_ids(messages, param, served)?,
            Self::Messages(messages) => messages_to_closed_ids(messages, param, served, base)?,
        };
        if ids.is_empty() {
            return Err(ApiError::invalid(Some(param), format!("{param} must not be empty")));
        }
        Ok(ids)
    }
}

/// `POST /v1/sessions`
pub(in crate::api) async fn create(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = Arc::clone(state.ready()?);
    let bytes = json_body(&state, &headers, bytes)?;
    let ticket = match attempt(&state, owner, &headers, "/v1/sessions", &bytes).await? {
        Attempt::Again(body) => return Ok(again(StatusCode::CREATED, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let mut request: CreateRequest = reading(&state, move || parse(&bytes)).await?;
    let (metadata, ttl) =
        (request.metadata.take().map(metadata).transpose()?, request.ttl_seconds.map(ttl).transpose()?);
    let label = label(request.label.take())?;
    let store = state.store()?.clone();
    if request.text.is_some() || request.tokens.is_some() || request.messages.is_some() || request.snapshot.is_some() {
        // Before anything is computed for it.
        store.admit(owner).await?;
    }
    let start = start(&state, &served, request).await?;
    let new = NewSession { start, metadata: metadata.unwrap_or_default(), ttl, label };
    let state_bytes = served.state_bytes;
    let body = move |session: &Session| json_of(session, state_bytes).to_string();
    let making = async move {
        let session = store.create_once(owner, new, ticket.as_ref().map(|ticket| ticket.promise(body))).await?;
        Ok(again(StatusCode::CREATED, body(&session)))
    };
    unbroken(&state, making).await
}

/// What a new session begins with: at most one of text, tokens, messages, version and snapshot.
async fn start(state: &AppState, served: &Arc<Served>, request: CreateRequest) -> Result<Start, ApiError> {
    let CreateRequest { text, tokens, messages, version, snapshot, seed, .. } = request;
    let text = Text::only(text, tokens, messages)?;
    let given = usize::from(text.is_some()) + usize::from(version.is_some()) + usize::from(snapshot.is_some());
    if given > 1 {
        let message = "text, tokens, messages, version and snapshot must not be given together";
        return Err(ApiError::invalid(Some("version"), message));
    }
    if seed.is_some() && (version.is_some() || snapshot.is_some()) {
        let message = "seed must be absent where a version or a snapshot is given: they have theirs";
        return Err(ApiError::invalid(Some("seed"), message));
    }
    if let Some(id) = version {
        return Ok(Start::Version(version_id(&id, "version")?));
    }
    if let Some(encoded) = snapshot {
        let served = Arc::clone(served);
        return reading(state, move || {
            let invalid = |error: String| ApiError::invalid(Some("snapshot"), format!("snapshot: {error}"));
            let bytes = BASE64.decode(encoded).map_err(|error| invalid(format!("must be base64: {error}")))?;
            let snapshot = served.codec.import(&bytes).map_err(|error| invalid(error.to_string()))?;
            Ok(Start::Snapshot(Arc::new(snapshot)))
        })
        .await;
    }
    let seed = seed.map_or_else(|| rand::rng().random(), Seed::bits);
    let Some(text) = text else { return Ok(Start::Empty { seed }) };
    let (_, snapshot) = read(state, served, Arc::new(Snapshot::empty(seed)), text).await?;
    Ok(Start::Snapshot(snapshot))
}

/// `POST /v1/sessions/{id}/append`
pub(in crate::api) async fn append(
    State(state): State<AppState>,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let served = Arc::clone(state.ready()?);
    let (id, bytes) = (named(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/append");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Again(body) => return Ok(again(StatusCode::OK, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let request: AppendRequest = reading(&state, move || parse(&bytes)).await?;
    let label = label(request.label)?;
    let missing = || ApiError::invalid(Some("text"), "one of text, tokens and messages must be given");
    let text = Text::only(request.text, request.tokens, request.messages)?.ok_or_else(missing)?;

    // Dropped on any way out of here but the commit, and where the client leaves before it: then the session is as it
    // was.
    let wait = wait(&headers)?;
    let place = if wait.is_zero() { None } else { Some(state.waiter()?) };
    let turn = state.store()?.begin(owner, &id, if_match(&headers)?, wait).await?;
    drop(place);
    let (appended, snapshot) = read(&state, &served, Arc::clone(turn.head()), text).await?;
    let version = VersionId::new();
    let body = body(turn.session(), &version, &snapshot, label.clone(), appended, &served);
    let (prompt_tokens, kind) = (appended as u64, "append".to_owned());
    let note = TurnNote { label, prompt_tokens, completion_tokens: 0, kind };
    let committing = async move {
        turn.commit(snapshot, note, ticket.as_ref().map(|ticket| ticket.receipt(&body)), version).await?;
        Ok(again(StatusCode::OK, body))
    };
    unbroken(&state, committing).await
}

/// The answer to an append, made before its commit, which keeps it.
fn body(
    before: &Session,
    version: &VersionId,
    snapshot: &Snapshot,
    label: Option<String>,
    appended: usize,
    served: &Served,
) -> String {
    let now = now();
    let head = Version {
        id: version.clone(),
        parent: Some(before.head.id.clone()),
        tokens: snapshot.tokens(),
        label,
        ..before.head.clone()
    };
    let expires = before.ttl.map(|ttl| now + ttl);
    let session = Session { head, updated: now, expires, in_use: false, ..before.clone() };
    let mut json = json_of(&session, served.state_bytes);
    json["appended_tokens"] = Value::from(appended);
    json.to_string()
}

/// Reads `text` after `base`: how many tokens it has, and the conversation with it.
async fn read(
    state: &AppState,
    served: &Arc<Served>,
    base: Arc<Snapshot>,
    text: Text,
) -> Result<(usize, Arc<Snapshot>), ApiError> {
    let param = text.param();
    let request = {
        let (served, base) = (Arc::clone(served), Arc::clone(&base));
        reading(state, move || {
            let prompt = text.ids(&served, &base)?;
            let keep = Keep { prompt: false, end: true };
            let parameters =
                RequestParameters { start: Origin::Session(base), prompt, keep, ..RequestParameters::default() };
            Request::new(parameters, &served.limits).map_err(|error| {
                // What the engine calls the prompt has another name here.
                ApiError::invalid(Some(param), error.to_string().replacen("prompt", param, 1))
            })
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
