//! The Tidegate text-generation server: HTTP in, server-sent events out.
//!
//! Layers, each knowing only those before it: [`text`] (token ids and characters), [`session`] (conversations that are
//! kept), [`engine`] (batching on its own thread), `metrics` (counts and times), [`api`] (the OpenAI format over HTTP),
//! and here: opening a [`checkpoint`], the application, serving it on a socket.

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

/// The application: every route, over `state`.
pub fn app(state: AppState) -> Router {
    api::router(state)
}
