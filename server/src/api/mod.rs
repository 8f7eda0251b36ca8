//! The HTTP API: requests in, JSON and server-sent events out.

pub(crate) mod admin;
mod auth;
mod error;
mod fair;
mod formats;
mod generation;
mod memory;
mod metrics;
mod middleware;
mod models;
mod openapi;
mod pages;
mod request;
mod routes;
mod run;
mod select;
mod served;
mod service;
mod sessions;
mod shares;
mod state;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::{Extension, Router};

use auth::middleware::{Auth, authorize};
use middleware::body_memory::count_body;
use middleware::body_timeout::body_timeout;
use middleware::browsers::{Browsers, check_browser};
use middleware::cors::cors;
use middleware::draining::close_connections;
use middleware::head_size::limit_head;
use middleware::panics::catch_panic;
use middleware::trace::trace;
use openapi::document::Description;
use routes::ROUTES;

pub use auth::keys::{Keys, KeysError};
pub use auth::scope::{Access, Scope};
pub use error::ApiError;
pub use middleware::cors::{Origin, OriginError};
pub use middleware::hosts::{AllowedHosts, HostName, HostNameError};
pub use models::{Loader, ModelOptions, ModelSource};
pub use state::{ApiOptions, AppState, Served};

/// Returns the pattern of every path, with the access that it needs.
pub fn paths() -> Vec<(String, Access)> {
    ROUTES.access.iter().map(|(path, access)| (path.clone(), *access)).collect()
}

/// Builds the router with all routes and middleware. Each layer wraps the layers before it.
pub(crate) fn router(state: AppState) -> Router {
    let options = state.options();
    let auth = Auth { state: state.clone(), access: &ROUTES.access };
    let description = Description::new(&ROUTES.description);
    let router = ROUTES
        .router
        .clone()
        .fallback(service::not_found)
        .method_not_allowed_fallback(service::method_not_allowed)
        .layer(Extension(Arc::new(description)))
        .layer(DefaultBodyLimit::max(options.max_body_bytes))
        .layer(from_fn_with_state(state.clone(), body_timeout))
        .layer(from_fn_with_state(state.clone(), count_body))
        .layer(from_fn_with_state(auth, authorize))
        .layer(from_fn(catch_panic));
    let router = if options.cors.is_empty() { router } else { router.layer(cors(&options.cors)) };
    let browsers = Browsers { state: state.clone(), hosts: options.hosts.clone(), keyed: true };
    let router = router.layer(from_fn_with_state(browsers, check_browser)).layer(from_fn(limit_head));
    let router = router.layer(from_fn(trace)).layer(from_fn_with_state(state.clone(), metrics::count));
    let router = router.layer(from_fn(formats::errors::in_format_of_path));
    router.layer(from_fn_with_state(state.clone(), close_connections)).with_state(state)
}
