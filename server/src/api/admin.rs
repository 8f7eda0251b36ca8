//! The routes of the admin address: health, readiness and metrics, for probes and Prometheus. They need no API key.

use std::net::IpAddr;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;

use super::middleware::browsers::{Browsers, check_browser};
use super::middleware::head_size::limit_head;
use super::middleware::panics::catch_panic;
use super::middleware::trace::trace;
use super::state::AppState;
use super::{formats, metrics, service};

/// Builds the router of the admin address, for a listener bound to `address`.
pub(crate) fn router(state: AppState, address: IpAddr) -> Router {
    let hosts = state.options().hosts.bound_to(address);
    let browsers = Browsers { state: state.clone(), hosts, keyed: false };
    Router::new()
        .route("/livez", get(service::alive))
        .route("/health", get(service::health))
        .route("/ready", get(service::ready))
        .route("/metrics", get(metrics::exposition))
        .fallback(service::not_found)
        .method_not_allowed_fallback(service::method_not_allowed)
        .layer(from_fn(catch_panic))
        .layer(from_fn_with_state(browsers, check_browser))
        .layer(from_fn(limit_head))
        .layer(from_fn(trace))
        .layer(from_fn_with_state(state.clone(), metrics::count))
        .layer(from_fn(formats::errors::in_format_of_path))
        .with_state(state)
}
