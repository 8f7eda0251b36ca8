//! HTTP: requests in, JSON and server-sent events out. Only this module serialises.

mod auth;
mod error;
mod formats;
mod generation;
mod metrics;
mod middleware;
mod openapi;
mod pages;
mod request;
mod routes;
mod run;
mod service;
mod sessions;
mod state;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::{Extension, Router};

use auth::middleware::{Auth, authorize};
use middleware::body_timeout::body_timeout;
use middleware::cors::cors;
use middleware::panics::catch_panic;
use middleware::trace::trace;
use routes::Routes;

pub use auth::keys::{Keys, KeysError};
pub use auth::scope::{Access, Scope};
pub use error::ApiError;
pub use middleware::cors::{Origin, OriginError};
pub use state::{ApiOptions, AppState, Served};

/// The pattern of every path, and the access that it needs.
pub fn paths() -> Vec<(String, Access)> {
    routes::all().access.into_iter().collect()
}

/// Every route, with its middleware. Each layer wraps those before it.
pub(crate) fn router(state: AppState) -> Router {
    let options = state.options();
    let Routes { router, access, description } = routes::all();
    let auth = Auth { state: state.clone(), access: Arc::new(access) };
    let router = router
        .layer(Extension(Arc::new(description)))
        .fallback(service::not_found)
        .method_not_allowed_fallback(service::method_not_allowed)
        .layer(DefaultBodyLimit::max(options.max_body_bytes))
        .layer(from_fn_with_state(state.clone(), body_timeout))
        .layer(from_fn_with_state(auth, authorize))
        .layer(from_fn(catch_panic));
    let router = if options.cors.is_empty() { router } else { router.layer(cors(&options.cors)) };
    let router = router.layer(from_fn(trace)).layer(from_fn_with_state(state.clone(), metrics::count));
    router.layer(from_fn(formats::errors::in_format_of_path)).with_state(state)
}
