//! `GET /metrics`, and the middleware that counts responses.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::models::{ModelState, Models};
use super::openapi::Error;
use super::service;
use super::state::{AppState, Served};
use crate::metrics::{CLASSIC, ErrorLabels, HttpLabels, Member, Model, OPEN_METRICS, Sources, Stored};
use crate::session::Store;

tokio::task_local! {
    static ARRIVED: Instant;
}

/// Returns when the current request arrived, or the current time outside of a request.
pub(super) fn arrived() -> Instant {
    ARRIVED.try_with(|arrived| *arrived).unwrap_or_else(|_| Instant::now())
}

/// Metrics for Prometheus
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    tag = "service",
    responses(
        (status = 200, description = "The metrics.", content((String = CLASSIC), (String = OPEN_METRICS))),
        Error<404>
    )
)]
pub(super) async fn scrape(state: State<AppState>, headers: HeaderMap) -> Result<Response, ApiError> {
    if state.options().metrics_at_admin {
        let message = "this server has its metrics at another address (--admin-addr)";
        return Err(ApiError::request(StatusCode::NOT_FOUND, None, Some("not_found"), message));
    }
    Ok(exposition(state, headers).await)
}

/// Returns the metrics, for the API and for the admin address.
pub(super) async fn exposition(State(state): State<AppState>, headers: HeaderMap) -> Response {
    let entries = state.models().map(Models::entries).unwrap_or_default();
    let instances: Vec<_> = entries.iter().map(|entry| entry.instance()).collect();
    let members = entries.iter().zip(&instances).map(|(entry, instance)| {
        let (loads, unloads) = entry.changes();
        Member {
            name: entry.name(),
            state: word(entry.state()),
            loads,
            unloads,
            model: instance.as_deref().filter(|instance| !instance.is_asleep()).map(|instance| model(&instance.served)),
            store: instance.as_ref().and_then(|instance| instance.store.as_ref()).map(stored),
        }
    });
    let sources = Sources {
        ready: service::readiness(&state).is_ok(),
        model: state.loaded().ok().map(|served| model(served)),
        store: state.store().ok().map(stored),
        models: members.collect(),
    };
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepts.into_iter().any(|value| value.contains("application/openmetrics-text"));
    let kind = if open { OPEN_METRICS } else { CLASSIC };
    ([(header::CONTENT_TYPE, kind)], state.metrics().text(&sources, open)).into_response()
}

fn stored(store: &Store) -> Stored {
    (store.stats(), store.latencies())
}

fn model(served: &Served) -> Model<'_> {
    Model {
        name: &served.name,
        fingerprint: &served.fingerprint,
        device: &served.device,
        engine: &served.engine,
        prefixes: &served.prefixes,
    }
}

fn word(state: ModelState) -> &'static str {
    match state {
        ModelState::Loaded => "loaded",
        ModelState::Loading => "loading",
        ModelState::Unloaded => "unloaded",
        ModelState::Failed => "failed",
    }
}

/// Middleware that counts responses.
pub(super) async fn count(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = method(request.method());
    let response = ARRIVED.scope(Instant::now(), next.run(request)).await;
    let status = response.status();
    // Clients choose paths, so the label is the pattern of the route.
    let route = route.as_ref().map_or("other", MatchedPath::as_str).to_owned();
    state.metrics().count_response(&HttpLabels { route, method, status: status.as_u16() });
    if status.is_client_error() || status.is_server_error() {
        let code = response.extensions().get::<ApiError>().map_or("other", ApiError::label);
        state.metrics().count_error(&ErrorLabels { status: status.as_u16(), code });
    }
    response
}

/// Returns the method's name, or `other` for methods that HTTP does not define, which clients may invent.
fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        Method::CONNECT => "CONNECT",
        Method::PATCH => "PATCH",
        Method::TRACE => "TRACE",
        _ => "other",
    }
}
