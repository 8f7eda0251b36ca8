//! The trait that every wire format of text requests implements, and the handler that the formats share.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::de::DeserializeOwned;

use super::json;
use super::unsupported::Ignored;
use crate::api::auth::context;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::{Continuation, OnDisconnect, SessionParameters};
use crate::api::request::{TextRequest, ValidRequest};
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::run::recording::{Asked, Recorded, Recording};
use crate::api::run::retry::{Attempt, attempt, repeated};
use crate::api::run::{self, RunOptions, sink, version};
use crate::api::state::{AppState, Served};
use crate::session::Owner;

/// How many copies of a response's text a replayed stream holds in memory: the stored body, and in `/v1/responses` a
/// delta and the four last events.
const REPLAYED_COPIES: usize = 6;

/// A converted request body.
pub(in crate::api) struct Converted<O> {
    pub(in crate::api) request: TextRequest,
    pub(in crate::api) session: SessionParameters,
    pub(in crate::api) stream: bool,
    /// The fields that have no effect.
    pub(in crate::api) ignored: Ignored,
    /// What the encoder needs to know about the body.
    pub(in crate::api) options: O,
}

/// A wire format, implemented by the type of its request bodies.
pub(in crate::api) trait Format: DeserializeOwned + Send + 'static {
    /// What the encoder needs to know about a body.
    type Options: Send + 'static;

    /// The path, which an idempotency key is tied to; `None` if the format takes no such keys.
    const IDEMPOTENT_PATH: Option<&'static str> = None;

    /// Refuses what the format does not support, and converts the rest.
    fn convert(self, served: &Served) -> Result<Converted<Self::Options>, ApiError>;

    /// Finds what the request continues.
    fn continuation(
        _options: &mut Self::Options,
        session: SessionParameters,
        state: &AppState,
        served: &Arc<Served>,
        owner: Owner,
        headers: &HeaderMap,
    ) -> impl Future<Output = Result<Continuation, ApiError>> + Send {
        Continuation::find(session, state, served, owner, headers)
    }

    /// Creates the encoder of the response. With `collect`, [`EventEncoder::body`] may be called at the end.
    fn encoder(options: Self::Options, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder>;

    /// Returns the events of a stream that repeats a response with this body, for a retry of its request.
    fn replay(_options: &Self::Options, _body: &str) -> Vec<StreamEvent> {
        Vec::new()
    }
}

/// Handles a text request.
pub(in crate::api) async fn generate<F: Format>(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json::body(&headers, body, state.options().max_body_bytes)?;
    respond::<F>(state, owner, (headers, body), None).await
}

/// Runs a request again that another server has begun and recorded.
pub(in crate::api) async fn repeat<F: Format>(
    state: AppState,
    owner: Owner,
    recording: Recording,
) -> Result<Response, ApiError> {
    respond::<F>(state, owner, recording.request(), Some(recording)).await
}

async fn respond<F: Format>(
    state: AppState,
    owner: Owner,
    (headers, body): (HeaderMap, Bytes),
    recording: Option<Recording>,
) -> Result<Response, ApiError> {
    let state = state.for_body(&body).await?.awake().await?;
    let served = Arc::clone(state.ready()?);
    if let Some(recording) = &recording {
        recording.check(&served)?;
    }
    let attempt = match F::IDEMPOTENT_PATH {
        Some(path) if recording.is_some() => repeated(&state, owner, &headers, path, &body).await?,
        Some(path) => attempt(&state, owner, &headers, path, &body).await?,
        None => Attempt::Unmarked,
    };
    let (model, bytes, raw) = (Arc::clone(&served), body.len(), body.clone());
    let converting = run_blocking(&state, bytes, move || {
        let mut converted = json::parse::<F>(&body)?.convert(&model)?;
        let grammar = converted.request.find_grammar(&model)?;
        Ok((converted, grammar))
    });
    let (Converted { mut request, mut session, stream, ignored, mut options }, grammar) = converting.await?;
    session.texts = request.choices.generated;
    let ticket = match attempt {
        Attempt::Unmarked => None,
        Attempt::First(ticket) => Some(ticket),
        Attempt::Retry(body, memory) if stream => {
            drop(memory);
            let memory = state.response_memory().reserve_repeated(owner, REPLAYED_COPIES * body.len())?;
            let events = F::replay(&options, &body);
            let response = sink::replayed(events, memory, state.options().keep_alive);
            return Ok(ignored.list(version::tagged(response, version::of_body(&body).as_deref())));
        }
        Attempt::Retry(body, memory) => {
            let version = version::of_body(&body);
            return Ok(ignored.list(version::tagged(sink::repeated(body, memory), version.as_deref())));
        }
    };
    let on_disconnect = session.on_disconnect()?;
    let asked = || Asked::of(&state, (F::IDEMPOTENT_PATH, &headers, &raw), &request, &served).map(Recorded::New);
    let mut recorded = match recording {
        Some(recording) => Some(Recorded::Again(Box::new(recording))),
        None if stream && on_disconnect == OnDisconnect::Continue => asked(),
        None => None,
    };
    drop(raw);
    if let Some(recorded) = &recorded {
        recorded.fix(&mut request, &mut session);
    }
    let grammar = grammar.compile(&state, &served).await?;
    let continuation = F::continuation(&mut options, session, &state, &served, owner, &headers).await?;
    if let Some(recorded) = &mut recorded {
        request.begun = recorded.begun().await?;
    }
    let collect = !stream || ticket.is_some();
    // The encoder is created here, too, because it may decode a long prompt of token ids into text.
    let auth = context::current();
    let request = TextRequest { collected: collect, streamed: stream, ..request };
    let validating = run_blocking(&state, bytes, move || {
        let request = request.validate(&served, &continuation, grammar, auth.as_deref())?;
        let encoder = F::encoder(options, &request, collect);
        Ok((request, encoder, continuation))
    });
    let (request, encoder, continuation) = validating.await?;
    let options = RunOptions { stream, plan: continuation.into_plan(), on_disconnect, ticket, recorded };
    Ok(ignored.list(run::start(state, request, encoder, options).await?))
}
