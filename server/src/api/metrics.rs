//! `GET /metrics`, and the middleware that counts responses.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::ApiError;
use super::state::AppState;
use crate::metrics::{CLASSIC, ErrorLabels, HttpLabels, Model, OPEN_METRICS, Sources};

tokio::task_local! {
    static ARRIVED: Instant;
}

/// When the current request arrived; now, outside of a request.
pub(super) fn arrived() -> Instant {
    ARRIVED.try_with(|arrived| *arrived).unwrap_or_else(|_| Instant::now())
}

/// Metrics for Prometheus
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "metrics",
    tag = "service",
    responses((status = 200, description = "The metrics.", content((String = CLASSIC), (String = OPEN_METRICS))))
)]
pub(super) async fn scrape(State(state): State<AppState>, headers: HeaderMap) -> Response {
    let served = state.loaded().ok();
    let model = served.map(|served| Model {
        name: &served.name,
        fingerprint: &served.fingerprint,
        device: &served.device,
        engine: &served.engine,
        prefixes: &served.prefixes,
    });
    let sources = Sources { model, store: state.store().ok().map(crate::session::Store::stats) };
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepts.into_iter().any(|value| value.contains("application/openmetrics-text"));
    let kind = if open { OPEN_METRICS } else { CLASSIC };
    ([(header::CONTENT_TYPE, kind)], state.metrics().text(&sources, open)).into_response()
}

/// Counts the response to a request.
pub(super) async fn count(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = method(request.method());
    let response = ARRIVED.scope(Instant::now(), next.run(request)).await;
    let status = response.status();
    // Clients choose paths, so only the patterns of routes are labels.
    let route = route.as_ref().map_or("other", MatchedPath::as_str).to_owned();
    state.metrics().count_response(&HttpLabels { route, method, status: status.as_u16() });
    if status.is_client_error() || status.is_server_error() {
        let code = response.extensions().get::<ApiError>().map_or("other", ApiError::label);
        state.metrics().count_error(&ErrorLabels { status: status.as_u16(), code });
    }
    response
}

/// The method's name; `other` for methods that HTTP does not define, which clients may invent.
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
