//! The Tidegate text-generation server: HTTP in, server-sent events out.
//!
//! Layers, each of which uses only those before it: [`text`] (characters and token ids), [`session`] (stored
//! conversations), [`engine`] (continuous batching on a thread of its own), `metrics`, [`api`] (routes and wire formats),
//! [`checkpoint`] (loading a model) and `serving` (listening on a socket).

pub mod api;
pub mod checkpoint;
pub mod engine;
mod metrics;
mod serving;
pub mod session;
pub mod text;

use axum::Router;

pub use api::{ApiOptions, AppState, Keys, Served};
pub use serving::{ServeOptions, Tls, TlsError, serve, serve_with};

/// The router with every route of the application.
pub fn app(state: AppState) -> Router {
    api::router(state)
}
