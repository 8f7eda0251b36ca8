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
use crate::api::auth::context::{self, Demand};
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::formats::json::parse;
use crate::api::formats::openai::answer::now;
use crate::api::formats::openai::wire::{ChatMessage, Seed, messages};
use crate::api::openapi::{BodyErrors, Error, Id, IdempotencyErrors, IdempotencyKey, IfMatch, Prefer, StoreErrors};
use crate::api::request::ParameterNames;
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::{begin, version_id, wait};
use crate::api::request::messages::PromptMessages;
use crate::api::request::prompt::{Conversation, encode_closed_messages, encode_text};
use crate::api::request::recorder::TextRecorder;
use crate::api::request::start::TextStart;
use crate::api::run::active::Stop;
use crate::api::run::register;
use crate::api::run::retry::{Attempt, attempt};
use crate::api::select::Model;
use crate::api::state::{AppState, Served};
use crate::engine::{Event, Failure, Request, RequestParameters};
use crate::session::{self, AddedText, NewSession, Owner, SessionId, Snapshot, Start, TurnNote, VersionId};

/// The text of a request, in one of its three forms.
enum Input {
    Text(String),
    Ids(Vec<u32>),
    Messages(Vec<ChatMessage>),
}

impl Input {
    /// Returns the form that is given; `None` if none is.
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

    /// Returns the input's tokens, and its messages if it consists of messages.
    fn ids(self, served: &Served, base: &Snapshot) -> Result<(Vec<u32>, Option<PromptMessages>), ApiError> {
        let (param, mut added) = (self.param(), None);
        let ids = match self {
            Self::Text(text) => encode_text(&text, param, served, Some(base))?,
            Self::Ids(ids) => ids,
            Self::Messages(given) => {
                let given = messages(given, param)?;
                let ids = encode_closed_messages(&given, param, served, base)?;
                added = Some(Conversation::from(given).added(&ids, served));
                ids
            }
        };
        if ids.is_empty() {
            return Err(ApiError::invalid(Some(param), format!("{param} must not be empty")));
        }
        Ok((ids, added))
    }
}

/// Create a session
///
/// The session starts from at most one of `text`, `tokens`, `messages`, `version` and `snapshot`. Without any, it is
/// empty.
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
        (status = 201, description = "The session.", body = Session),
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
    let bytes = json_body(&state, &headers, bytes)?;
    let state = state.for_body(&bytes).await?.awake().await?;
    let served = Arc::clone(state.ready()?);
    let ticket = match attempt(&state, owner, &headers, "/v1/sessions", &bytes).await? {
        Attempt::Retry(body, _) => return Ok(replay(StatusCode::CREATED, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let size = bytes.len();
    let mut request: CreateRequest = run_blocking(&state, size, move || parse(&bytes)).await?;
    if let Some(model) = &request.model {
        served.check_name(model, Some("model"))?;
    }
    let (own_metadata, ttl) =
        (request.metadata.take().map(metadata).transpose()?, request.ttl_seconds.map(ttl).transpose()?);
    let own_label = label(request.label.take())?;
    let store = state.store()?.clone();
    if request.text.is_some() || request.tokens.is_some() || request.messages.is_some() || request.snapshot.is_some() {
        // Refuse before computing anything.
        store.admit(owner).await?;
    }
    let start = start(&state, &served, owner, (request, size)).await?;
    // The file's metadata and label apply unless the request has its own.
    let (metadata, label) = match &start {
        Start::Uploaded(_, file) => (
            own_metadata.map_or_else(|| metadata(file.metadata.clone()), Ok)?,
            own_label.map_or_else(|| label(file.label.clone()), |own| Ok(Some(own)))?,
        ),
        _ => (own_metadata.unwrap_or_default(), own_label),
    };
    let new = NewSession { start, metadata, ttl, label };
    let state_bytes = served.state_bytes;
    let body = move |session: &session::Session| to_json(&Session::new(session, state_bytes));
    let creating = async move {
        let session = store.create_once(owner, new, ticket.as_ref().map(|ticket| ticket.promise(body))).await?;
        Ok(replay(StatusCode::CREATED, body(&session)))
    };
    to_completion(&state, creating).await
}

/// Returns what a new session starts from: at most one of text, tokens, messages, version and snapshot. The body had
/// `bytes` bytes.
async fn start(
    state: &AppState,
    served: &Arc<Served>,
    owner: Owner,
    (request, bytes): (CreateRequest, usize),
) -> Result<Start, ApiError> {
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
        return run_blocking(state, bytes, move || {
            let invalid = |error: String| ApiError::invalid(Some("snapshot"), format!("snapshot: {error}"));
            let bytes = BASE64.decode(encoded).map_err(|error| invalid(format!("must be base64: {error}")))?;
            let (snapshot, conversation) = served.codec.import(&bytes).map_err(|error| invalid(error.to_string()))?;
            Ok(Start::Uploaded(Arc::new(snapshot), conversation))
        })
        .await;
    }
    let seed = seed.map_or_else(|| rand::rng().random(), Seed::bits);
    let Some(input) = input else { return Ok(Start::Empty { seed }) };
    let base = Arc::new(Snapshot::empty(seed));
    let Read { snapshot, text, .. } =
        prepare(state, served, (owner, base), (input, bytes)).await?.run(state, owner, None).await?;
    Ok(Start::Read(snapshot, text))
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
        (status = 200, description = "The session.", body = Appended),
        StoreErrors,
        BodyErrors,
        IdempotencyErrors,
        Error<412>,
        Error<507>
    )
)]
pub(super) async fn append(
    Model(state): Model,
    Caller(owner): Caller,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    bytes: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let state = state.awake().await?;
    let served = Arc::clone(state.ready()?);
    let (id, bytes) = (path_id(id)?, json_body(&state, &headers, bytes)?);
    let path = format!("/v1/sessions/{id}/append");
    let ticket = match attempt(&state, owner, &headers, &path, &bytes).await? {
        Attempt::Retry(body, _) => return Ok(replay(StatusCode::OK, body)),
        Attempt::First(ticket) => Some(ticket),
        Attempt::Unmarked => None,
    };
    let size = bytes.len();
    let request: AppendRequest = run_blocking(&state, size, move || parse(&bytes)).await?;
    let label = label(request.label)?;
    let missing = || ApiError::invalid(Some("text"), "one of text, tokens and messages must be given");
    let input = Input::new(request.text, request.tokens, request.messages)?.ok_or_else(missing)?;

    let wait = wait(&headers)?;
    let permit = if wait.is_zero() { None } else { Some(state.waiters().enter(owner)?) };
    // Dropping the turn before its commit, on an error or a disconnect, leaves the session unchanged.
    let mut turn = begin(&state, owner, &id, &headers, wait).await?;
    drop(permit);
    let reading = prepare(&state, &served, (owner, Arc::clone(turn.head())), (input, size)).await?;
    let (tokens, messages) = (reading.request.prompt_tokens() as u64, reading.recorder.most_message_bytes());
    turn.reserve_text(tokens, served.limits.vocab_size as u64, messages).await?;
    let Read { tokens: appended, snapshot, text } = reading.run(&state, owner, Some(id)).await?;
    let version = VersionId::new();
    let body = body(turn.session(), &version, &snapshot, label.clone(), appended, &served);
    let (prompt_tokens, kind) = (appended as u64, "append".to_owned());
    let note = TurnNote { label, prompt_tokens, completion_tokens: 0, kind, text: Some(text) };
    let committing = async move {
        turn.commit(snapshot, note, ticket.as_ref().map(|ticket| ticket.receipt(body.clone())), version).await?;
        Ok(replay(StatusCode::OK, body))
    };
    to_completion(&state, committing).await
}

/// Builds the response to an append. It is built before the commit, which stores it in the receipt.
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

/// The result of reading an input.
struct Read {
    tokens: usize,
    snapshot: Arc<Snapshot>,
    text: AddedText,
}

/// Input that is ready for the model to read.
struct Reading {
    served: Arc<Served>,
    request: Request,
    recorder: TextRecorder,
    /// The parameter that has the input.
    param: &'static str,
}

/// Encodes `input`, which came in a body of `bytes` bytes, to be read after `base`.
async fn prepare(
    state: &AppState,
    served: &Arc<Served>,
    (owner, base): (Owner, Arc<Snapshot>),
    (input, bytes): (Input, usize),
) -> Result<Reading, ApiError> {
    let (served, param) = (Arc::clone(served), input.param());
    run_blocking(state, bytes, move || {
        let (prompt, messages) = input.ids(&served, &base)?;
        let recorder = TextRecorder::new(&base, &prompt, messages, &served);
        let TextStart { start, snapshot, keeper } = TextStart::turn(&base, &served, owner, (&prompt, true));
        let parameters = RequestParameters { start, prompt, snapshot, keeper, ..RequestParameters::default() };
        let names = ParameterNames::openai(param, "max_tokens");
        let request = Request::new(parameters, &served.limits).map_err(|error| names.error(&error))?;
        Ok(Reading { served, request, recorder, param })
    })
    .await
}

impl Reading {
    /// Lets the model read the input. Nothing is committed before the end, so the removal of the key, the deletion of
    /// the session or a shutdown ends it at once.
    async fn run(self, state: &AppState, owner: Owner, session: Option<SessionId>) -> Result<Read, ApiError> {
        let Self { served, request, recorder, param } = self;
        let tokens = request.prompt_tokens();
        let names = [param, "max_tokens", "n"];
        let mut registration = register(state, owner, session, Stop::ShuttingDown).await?;
        let _guard = state.run_begins();
        let mut reservation = context::reserve(&Demand { texts: 1, prompt_tokens: tokens, max_tokens: 0, names })?;
        let streams = served.engine.submit_for(context::tenant(), vec![request])?;
        let mut events = streams.into_iter().next().ok_or_else(ApiError::internal)?;
        if let Some(reservation) = &mut reservation {
            reservation.spend(tokens);
        }
        loop {
            let event = tokio::select! {
                biased;
                stop = registration.stopped() => match stop.error() {
                    Some(error) => return Err(error),
                    // The time limit for a text has passed, but this generates none.
                    None => continue,
                },
                event = events.next() => event,
            };
            match event.unwrap_or(Event::Failed(Failure::Internal)) {
                Event::Finished(finish) => {
                    let text = recorder.finish(&finish);
                    let read = finish.snapshot.zip(text).map(|(snapshot, text)| Read { tokens, snapshot, text });
                    return read.ok_or_else(ApiError::internal);
                }
                Event::Failed(failure) => return Err(failure.into()),
                Event::PromptLogprobs(_) | Event::Delta(_) => {}
            }
        }
    }
}
