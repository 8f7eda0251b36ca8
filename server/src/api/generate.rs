//! Requests for text, whatever their format: from the body to a run.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use tracing::debug;

use super::account::Account;
use super::answer::{Head, Wanted, replay};
use super::chat::Chat;
use super::completions::Completions;
use super::dialect::Dialect;
use super::error::ApiError;
use super::idempotency::{Attempt, attempt};
use super::origin::Origin;
use super::auth::owner::Caller;
use super::run::{OnDisconnect, Run};
use super::sessions::label;
use super::sink;
use super::state::AppState;
use super::texts::Texts;
use super::unsupported;
use super::validate::{Validated, validate};
use super::wire::{self, Format, GenerationRequest};

/// `POST /v1/completions`
pub(super) async fn completions(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    create(Format::Completions, state, caller, headers, body).await
}

/// `POST /v1/chat/completions`
pub(super) async fn chat(
    State(state): State<AppState>,
    caller: Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    create(Format::Chat, state, caller, headers, body).await
}

async fn create(
    format: Format,
    state: AppState,
    Caller(owner): Caller,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let body = wire::body(&headers, body, state.options().max_body_bytes)?;
    let served = Arc::clone(state.ready()?);
    let attempt = attempt(&state, owner, &headers, format.path(), &body).await?;
    let parsing = reading(&state, move || {
        let mut wire: GenerationRequest = wire::parse(&body)?;
        wire.take_forms()?;
        unsupported::refuse(format, &wire.rest)?;
        // Nothing else is made of them, and the request may have to wait.
        wire.rest.clear();
        Ok(wire)
    });
    let wire = parsing.await?;
    let stream = wire.stream.unwrap_or(false);
    let ticket = match attempt {
        Attempt::Unmarked => None,
        Attempt::First(ticket) => Some(ticket),
        Attempt::Again(body) if stream => {
            let words = replay(&body, wire.include_usage());
            return Ok(sink::replayed(words, state.options().keep_alive));
        }
        Attempt::Again(body) => return Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response()),
    };
    let (on_disconnect, label) = (on_disconnect(&wire)?, label(wire.label.clone())?);
    let origin = Origin::find(&state, &served, owner, &headers, &wire).await?;
    let (validated, origin) = {
        let served = Arc::clone(&served);
        reading(&state, move || Ok((validate(format, wire, &served, &origin)?, origin))).await?
    };
    let Validated { requests, prompts, cached, include_usage, return_token_ids, seed, details } = validated;
    debug!(seed, prompts = prompts.len(), texts = requests.len(), stream, "completion starts");
    let account = Account::new(&prompts, cached);
    let wanted = Wanted { include_usage, token_ids: return_token_ids, whole: !stream || ticket.is_some() };
    let dialect: Box<dyn Dialect> = match format {
        Format::Completions => Box::new(Completions::new(Head::new("cmpl", &served), wanted, &prompts, details)),
        _ => Box::new(Chat::new(Head::new("chatcmpl", &served), wanted, &details)),
    };
    let texts = Texts::new(account, served.engine.submit_all(requests)?);
    let keeping = origin.keeping(label);
    Run { state, served, texts, dialect, keeping, on_disconnect, ticket }.answer(stream).await
}

/// What is to happen where the client leaves: only a session's turn can outlive it.
fn on_disconnect(wire: &GenerationRequest) -> Result<OnDisconnect, ApiError> {
    match wire.on_disconnect {
        None | Some(OnDisconnect::Rollback) => Ok(OnDisconnect::Rollback),
        Some(asked) if wire.session.is_some() => Ok(asked),
        Some(_) => {
            let message = "on_disconnect must be rollback where there is no session to commit to";
            Err(ApiError::invalid(Some("on_disconnect"), message))
        }
    }
}

/// Runs `work` away from the connections' threads: a long prompt takes a while to parse and to encode, and other
/// connections must not wait for it.
pub(super) async fn reading<T: Send + 'static>(
    state: &AppState,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let permit = state.reader().await;
    let reading = tokio::task::spawn_blocking(move || {
        // Held to the end of the work, also where the client leaves before.
        let _permit = permit;
        work()
    });
    reading.await.map_err(|_| ApiError::internal())?
}
