//! Turns a panic in a handler into a 500 in OpenAI's format, without the panic's message.

use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;

use crate::api::error::ApiError;

/// Middleware that answers 500 when the handler panics; the panic hook logs the message.
pub(in crate::api) async fn catch_panic(request: Request, next: Next) -> Response {
    // State shared with other requests is behind locks and channels; everything else is dropped here.
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    answer.unwrap_or_else(|_| ApiError::internal().into_response())
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::{Body, to_bytes};
    use axum::http::StatusCode;
    use axum::middleware::from_fn;
    use axum::routing::get;
    use tower::ServiceExt;

    use super::*;

    async fn broken() -> StatusCode {
        panic!("scripted panic")
    }

    #[tokio::test]
    async fn a_panic_is_answered_without_its_message() {
        let app = Router::new().route("/", get(broken)).layer(from_fn(catch_panic));
        let response = app.oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let text = String::from_utf8_lossy(&body);
        assert!(text.contains(r#""type":"server_error""#) && !text.contains("scripted"), "{text}");
    }
}
