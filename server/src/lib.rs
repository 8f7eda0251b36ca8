//! The Tidegate text-generation server: HTTP in, server-sent events out.
//!
//! Layers, each knowing only those before it: [`text`] (token ids and characters), [`session`] (conversations that are
//! kept), [`engine`] (batching on its own thread), [`api`] (the OpenAI format over HTTP), and here: opening a
//! [`checkpoint`], the application, serving it.

pub mod api;
pub mod checkpoint;
pub mod engine;
pub mod session;
pub mod text;

use std::future::Future;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;

pub use api::{ApiOptions, AppState, Keys, Served};

/// The application: every route, over `state`.
pub fn app(state: AppState) -> Router {
    api::router(state)
}

/// Serves `app` until `shutdown` ends; requests that run then are finished.
///
/// # Errors
/// The listener failed.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let listener = listener.tap_io(|connection| {
        // A token is a small packet that must not wait for the next; without the option it is late, not wrong.
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY on a connection");
        }
    });
    axum::serve(listener, app).with_graceful_shutdown(shutdown).await
}
