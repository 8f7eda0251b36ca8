//! The time limit for receiving a request's body, so that a slow sender cannot hold a connection forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use futures_util::{StreamExt, stream};
use tokio::time::{Instant, timeout_at};

use super::closing;
use crate::api::error::ApiError;
use crate::api::state::AppState;

/// Middleware that answers 408 when the body does not arrive in time, whichever handler reads it.
pub(in crate::api) async fn body_timeout(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if request.body().is_end_stream() {
        return next.run(request).await;
    }
    let limit = state.options().body_limit;
    let late = Arc::new(AtomicBool::new(false));
    let timed_out = Arc::clone(&late);
    let end = Instant::now() + limit;
    let request = request.map(|body| {
        let parts = stream::unfold(Some((body.into_data_stream(), late)), move |reading| async move {
            let (mut parts, late) = reading?;
            match timeout_at(end, parts.next()).await {
                Ok(part) => Some((part?, Some((parts, late)))),
                Err(elapsed) => {
                    late.store(true, Ordering::Relaxed);
                    Some((Err(axum::Error::new(elapsed)), None))
                }
            }
        });
        Body::from_stream(parts)
    });
    let response = next.run(request).await;
    if !timed_out.load(Ordering::Relaxed) {
        return response;
    }
    let message = format!("the request body must arrive within {} s", limit.as_secs_f32());
    closing(ApiError::request(StatusCode::REQUEST_TIMEOUT, None, Some("body_timeout"), message))
}
