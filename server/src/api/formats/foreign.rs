//! Requests in formats of other servers: what they ask for is a request for completions, and runs as one.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::Response;
use tracing::debug;

use crate::api::error::ApiError;
use crate::api::formats::openai::reading;
use crate::api::formats::openai::wire::{self, Format, GenerationRequest};
use crate::api::request::origin::Origin;
use crate::api::request::validate::{Validated, validate};
use crate::api::run::account::Account;
use crate::api::run::encoder::Dialect;
use crate::api::run::texts::Texts;
use crate::api::run::{OnDisconnect, Run};
use crate::api::state::{AppState, Served};
use crate::engine::Request;
use crate::session::Owner;

/// What is known of a run before its first token.
pub(in crate::api) struct Begun<'a> {
    pub(in crate::api) served: &'a Served,
    /// The ids of each prompt.
    pub(in crate::api) prompts: &'a [Vec<u32>],
    /// How many tokens of each prompt are known already.
    pub(in crate::api) cached: &'a [usize],
    pub(in crate::api) seed: u64,
    /// Whether the answer goes out as it comes.
    pub(in crate::api) stream: bool,
}

/// A format of requests that can be said as one for completions.
pub(in crate::api) trait Foreign: Sized + Send + 'static {
    /// What parameters are called here, where that is not what they are called there: first there, then here.
    const NAMES: &'static [(&'static str, &'static str)];

    /// Reads a body: the request, and what its answer needs to know.
    fn read(body: &[u8], served: &Served) -> Result<(GenerationRequest, Self), ApiError>;

    /// The format of the answer.
    fn dialect(self, begun: &Begun<'_>) -> Box<dyn Dialect>;
}

/// Answers a request that begins at nothing. The beginnings of its prompts are shared with the owner's others.
pub(in crate::api) async fn create<F: Foreign>(
    state: AppState,
    owner: Owner,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    run(state, owner, headers, body, F::read).await
}

/// The same where the path says something that the body does not.
pub(in crate::api) async fn run<F: Foreign>(
    state: AppState,
    owner: Owner,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    read: impl FnOnce(&[u8], &Served) -> Result<(GenerationRequest, F), ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let body = wire::body(headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let checking = {
        let served = Arc::clone(&served);
        reading(&state, move || {
            let (wire, foreign) = read(&body, &served)?;
            let (stream, origin) = (wire.stream.unwrap_or(false), Origin::Plain { owner });
            let validated = validate(Format::Completions, wire, &served, &origin).map_err(renamed::<F>)?;
            Ok((validated, origin, foreign, stream))
        })
    };
    let (Validated { requests, prompts, cached: known, seed, details, .. }, origin, foreign, stream) = checking.await?;
    debug!(seed, prompts = prompts.len(), stream, "completion starts");
    // Those of one prompt begin alike.
    let cached: Vec<usize> =
        requests.iter().step_by(details.choices.generated.max(1)).map(Request::cached_tokens).collect();
    let account = Account::new(&prompts, known);
    let begun = Begun { served: &served, prompts: &prompts, cached: &cached, seed, stream };
    let dialect = foreign.dialect(&begun);
    let texts = Texts::new(account, served.engine.submit_all(requests)?);
    let (keeping, on_disconnect) = (origin.keeping(None), OnDisconnect::Rollback);
    Run { state, served, texts, dialect, keeping, on_disconnect, ticket: None }.answer(stream).await
}

fn renamed<F: Foreign>(error: ApiError) -> ApiError {
    F::NAMES.iter().fold(error, |error, (there, here)| error.renamed(there, here))
}
