//! What every wire format of requests for text implements, and the handler that they share.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;

use super::json;
use crate::api::auth::owner::Caller;
use crate::api::error::ApiError;
use crate::api::request::blocking::run_blocking;
use crate::api::request::continuation::{Continuation, SessionParameters};
use crate::api::request::{TextRequest, ValidRequest};
use crate::api::run::encoder::{EventEncoder, StreamEvent};
use crate::api::run::retry::{Attempt, attempt};
use crate::api::run::{self, RunOptions, sink};
use crate::api::state::{AppState, Served};
use crate::session::Owner;

/// A request body, converted.
pub(in crate::api) struct Converted<O> {
    pub(in crate::api) request: TextRequest,
    pub(in crate::api) session: SessionParameters,
    pub(in crate::api) stream: bool,
    /// What the encoder needs to know of the body.
    pub(in crate::api) options: O,
}

/// A wire format, implemented by the type of its request bodies.
pub(in crate::api) trait Format: DeserializeOwned + Send + 'static {
    /// What the encoder needs to know of a body.
    type Options: Send + 'static;

    /// The path, which an idempotency key is tied to; none if the format has no such keys.
    const IDEMPOTENT_PATH: Option<&'static str> = None;

    /// Refuses what the format does not support, and converts the rest.
    fn convert(self, served: &Served) -> Result<Converted<Self::Options>, ApiError>;

    /// What the request continues.
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

    /// The encoder of the response. With `collect`, [`EventEncoder::body`] will be asked for.
    fn encoder(options: Self::Options, request: &ValidRequest, collect: bool) -> Box<dyn EventEncoder>;

    /// The stream for a retry of a request whose response had this body.
    fn replay(_options: &Self::Options, _body: &str) -> Vec<StreamEvent> {
        Vec::new()
    }
}

/// Handles a request for text.
pub(in crate::api) async fn generate<F: Format>(
    State(state): State<AppState>,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = json::body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let attempt = match F::IDEMPOTENT_PATH {
        Some(path) => attempt(&state, owner, &headers, path, &body).await?,
        None => Attempt::Unmarked,
    };
    let model = Arc::clone(&served);
    let converting = run_blocking(&state, move || json::parse::<F>(&body)?.convert(&model));
    let Converted { request, session, stream, mut options } = converting.await?;
    let ticket = match attempt {
        Attempt::Unmarked => None,
        Attempt::First(ticket) => Some(ticket),
        Attempt::Retry(body) if stream => {
            return Ok(sink::replayed(F::replay(&options, &body), state.options().keep_alive));
        }
        Attempt::Retry(body) => return Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response()),
    };
    let on_disconnect = session.on_disconnect()?;
    let continuation = F::continuation(&mut options, session, &state, &served, owner, &headers).await?;
    let collect = !stream || ticket.is_some();
    // The encoder too: it may turn a long prompt of ids into text.
    let validating = run_blocking(&state, move || {
        let request = request.validate(&served, &continuation)?;
        let encoder = F::encoder(options, &request, collect);
        Ok((request, encoder, continuation))
    });
    let (request, encoder, continuation) = validating.await?;
    run::start(state, request, encoder, RunOptions { stream, plan: continuation.into_plan(), on_disconnect, ticket })
        .await
}
