//! The Tidegate text-generation server: HTTP in, server-sent events out.
//!
//! The layers, each of which uses only those before it: [`text`] (characters and token ids), [`session`] (stored
//! conversations), [`engine`] (continuous batching on a thread of its own), `metrics`, [`api`] (routes and wire
//! formats), [`checkpoint`] (loading a model) and `serving` (listening on a socket). [`ram`] divides the process's
//! memory. [`nearest`] guesses what a wrong name was meant to be. `priority` lowers the priority of threads. `sync` has
//! the locks of code that is also run under a concurrency model checker.

pub mod api;
pub mod checkpoint;
pub mod engine;
mod metrics;
pub mod nearest;
mod priority;
pub mod ram;
mod serving;
pub mod session;
mod sync;
pub mod text;

use std::net::IpAddr;

use axum::Router;

pub use api::{ApiOptions, AppState, Keys, Served};
pub use serving::{ServeOptions, Tls, TlsError, serve, serve_with};

/// Returns the router with every route of the application.
pub fn app(state: AppState) -> Router {
    api::router(state)
}

/// Returns the router of the admin address, for a listener bound to `address`: health, readiness and metrics.
pub fn admin_app(state: AppState, address: IpAddr) -> Router {
    api::admin::router(state, address)
}
