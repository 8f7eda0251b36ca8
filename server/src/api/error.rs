//! Errors in the OpenAI shape: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tracing::{error, info, warn};

use crate::engine::{Failure, RequestError, SubmitError};
use crate::session::StoreError;

/// Longest message that the log repeats, in characters.
const LOGGED_CHARACTERS: usize = 500;

/// An answer that says why not.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    /// A request that cannot be right, whoever gets it.
    pub(super) fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, param, None, message)
    }

    /// A request that is refused with `status`.
    pub(super) fn request(
        status: StatusCode,
        param: Option<&str>,
        code: Option<&'static str>,
        message: impl Into<String>,
    ) -> Self {
        let (message, param) = (message.into(), param.map(str::to_owned));
        Self { status, message, kind: "invalid_request_error", param, code }
    }

    /// A fault of the server's.
    pub(super) fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), kind: "server_error", param: None, code: Some(code) }
    }

    /// A key that has had enough for now.
    pub(super) fn limited(message: impl Into<String>) -> Self {
        let (status, message) = (StatusCode::TOO_MANY_REQUESTS, message.into());
        Self { status, message, kind: "rate_limit_error", param: None, code: Some("rate_limit_exceeded") }
    }

    /// The same refusal where the parameter is called `name`.
    pub(super) fn renamed(mut self, from: &str, name: &str) -> Self {
        if self.param.as_deref() == Some(from) {
            if let Some(rest) = self.message.strip_prefix(from) {
                self.message = format!("{name}{rest}");
            }
            self.param = Some(name.to_owned());
        }
        self
    }

    /// A thing that is not there, or that is another owner's.
    pub(super) fn missing(param: &str, what: &str) -> Self {
        let message = format!("no {what} has this id");
        Self::request(StatusCode::NOT_FOUND, Some(param), Some("not_found"), message)
    }

    /// In one word, from a set that does not grow: the code, or the type where there is none.
    pub(super) fn word(&self) -> &'static str {
        self.code.unwrap_or(self.kind)
    }

    /// The status that it is answered with.
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// In words.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// A panic. Its words are for the log alone.
    pub(super) fn internal() -> Self {
        let message = "the server failed on this request; its log has the reason under the request's id";
        Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// The error as a JSON object, also for the middle of a stream.
    pub(super) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // A message may quote the client, who must not be able to forge a log line, nor to write a long one.
        let message: String = self.message.escape_debug().take(LOGGED_CHARACTERS).collect();
        let (status, param) = (self.status.as_u16(), &self.param);
        match status {
            500 => error!(status, "failed: {message}"),
            501.. => warn!(status, "not served: {message}"),
            _ => info!(status, param, "refused: {message}"),
        }
        let mut response = (self.status, Json(self.body())).into_response();
        let passing = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::CONFLICT];
        if passing.contains(&self.status) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        // For the formats that say it in another shape, and for who counts it.
        response.extensions_mut().insert(self);
        response
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::NotFound { what } => Self::missing(what, what),
            StoreError::Busy { .. } => {
                Self::request(StatusCode::CONFLICT, Some("session"), Some("session_in_use"), message)
            }
            StoreError::Stale { .. } => {
                Self::request(StatusCode::PRECONDITION_FAILED, Some("if-match"), Some("version_mismatch"), message)
            }
            StoreError::Quota { .. } => Self::request(StatusCode::FORBIDDEN, None, Some("quota_exceeded"), message),
            StoreError::Full { .. } => Self::server(StatusCode::INSUFFICIENT_STORAGE, "store_full", message),
            StoreError::Unavailable { .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
            }
            StoreError::Corrupt { .. } => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "snapshot_damaged", message),
            StoreError::TooManyForks { .. } => Self::invalid(Some("n"), message),
            StoreError::Unstorable { .. } => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "state_unfit", message),
            StoreError::Index { .. } | StoreError::Option { .. } => {
                // These are said at the start, before any request.
                Self::internal()
            }
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::invalid(Some(error.parameter()), error.to_string())
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::QueueFull => Self {
                status: StatusCode::TOO_MANY_REQUESTS,
                message: error.to_string(),
                kind: "rate_limit_error",
                param: None,
                code: Some("queue_full"),
            },
            SubmitError::Closed => Self::server(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", error.to_string()),
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Internal => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "generation_failed", failure.to_string())
            }
            Failure::Grammar => {
                Self::request(StatusCode::BAD_REQUEST, None, Some("grammar_limit"), failure.to_string())
            }
            Failure::ShuttingDown => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", failure.to_string())
            }
            Failure::Stalled => Self::server(StatusCode::REQUEST_TIMEOUT, "stalled", failure.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grammar_past_its_limits_is_the_requests_doing() {
        let error = ApiError::from(Failure::Grammar);
        assert_eq!((error.status(), error.word()), (StatusCode::BAD_REQUEST, "grammar_limit"));
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        assert_eq!(ApiError::from(Failure::Internal).status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
