//! Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use tracing::{error, info, warn};
use utoipa::ToSchema;

use crate::engine::{Failure, RequestError, SubmitError};
use crate::session::StoreError;

/// Longest message in the log, in characters.
const LOGGED_CHARACTERS: usize = 500;

/// An error response.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    error: ErrorDetails,
    retry: Retry,
}

/// When a client should retry, for statuses that allow a retry.
#[derive(Clone, Copy, Debug)]
enum Retry {
    /// After this many seconds.
    After(u64),
    /// Never: the same request would be refused again.
    Never,
}

/// The body of an error response.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub(super) struct ErrorBody {
    error: ErrorDetails,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(super) struct ErrorDetails {
    /// What is wrong, for people to read.
    message: String,
    #[serde(rename = "type")]
    kind: ErrorKind,
    /// The parameter at fault, if the error is about one.
    #[schema(required)]
    param: Option<String>,
    /// What is wrong, for programs to read.
    #[schema(required)]
    code: Option<&'static str>,
}

/// What is at fault: the request, the rate of requests, or the server.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
enum ErrorKind {
    #[serde(rename = "invalid_request_error")]
    InvalidRequest,
    #[serde(rename = "rate_limit_error")]
    RateLimit,
    #[serde(rename = "server_error")]
    Server,
}

impl ApiError {
    fn new(
        status: StatusCode,
        kind: ErrorKind,
        param: Option<&str>,
        code: Option<&'static str>,
        message: impl Into<String>,
    ) -> Self {
        let (message, param) = (message.into(), param.map(str::to_owned));
        Self { status, error: ErrorDetails { message, kind, param, code }, retry: Retry::After(1) }
    }

    /// Creates the error for an invalid request, with status 400.
    pub(super) fn invalid(param: Option<&str>, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, param, None, message)
    }

    /// Creates the error for a text that the engine refuses. `param` is the client's name for the parameter at fault.
    pub(super) fn about_text(error: &RequestError, param: &str, message: String) -> Self {
        match error {
            RequestError::TooLong { .. } => Self::too_long(param, message),
            _ => Self::invalid(Some(param), message),
        }
    }

    /// Creates the error for a prompt, in the parameter `param`, that is longer than the server reads.
    pub(super) fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self::request(StatusCode::BAD_REQUEST, Some(param), Some("context_length_exceeded"), message)
    }

    /// Creates an error that blames the request.
    pub(super) fn request(
        status: StatusCode,
        param: Option<&str>,
        code: Option<&'static str>,
        message: impl Into<String>,
    ) -> Self {
        Self::new(status, ErrorKind::InvalidRequest, param, code, message)
    }

    /// Creates an error that blames the server.
    pub(super) fn server(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::new(status, ErrorKind::Server, None, Some(code), message)
    }

    /// Creates a rate limit error, with status 429.
    pub(super) fn rate_limit(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, ErrorKind::RateLimit, None, Some(code), message)
    }

    /// Returns this error with `param` as the parameter at fault.
    pub(super) fn about(mut self, param: &str) -> Self {
        self.error.param = Some(param.to_owned());
        self
    }

    /// Returns this error with a retry delay in seconds.
    pub(super) fn retried_after(mut self, seconds: u64) -> Self {
        self.retry = Retry::After(seconds);
        self
    }

    /// Returns this error, marked so that clients do not retry the request.
    pub(super) fn never_retried(mut self) -> Self {
        self.retry = Retry::Never;
        self
    }

    /// Returns this error with `name` as the parameter at fault, also in the message, if it was `from`.
    pub(super) fn renamed(mut self, from: &str, name: &str) -> Self {
        if self.error.param.as_deref() == Some(from) {
            if let Some(rest) = self.error.message.strip_prefix(from) {
                self.error.message = format!("{name}{rest}");
            }
            self.error.param = Some(name.to_owned());
        }
        self
    }

    /// Creates the error for an object that does not exist or belongs to another owner, with status 404.
    pub(super) fn missing(param: &str, what: &str) -> Self {
        let message = format!("no {what} has this id");
        Self::request(StatusCode::NOT_FOUND, Some(param), Some("not_found"), message)
    }

    /// Returns the code, or the type if there is none. The set of values is bounded, so it can label a metric.
    pub(super) fn label(&self) -> &'static str {
        self.error.code.unwrap_or(match self.error.kind {
            ErrorKind::InvalidRequest => "invalid_request_error",
            ErrorKind::RateLimit => "rate_limit_error",
            ErrorKind::Server => "server_error",
        })
    }

    /// Returns what is wrong, for programs to read.
    pub(super) fn code(&self) -> Option<&'static str> {
        self.error.code
    }

    /// Returns the HTTP status.
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// Returns what is wrong, for people to read.
    pub(super) fn message(&self) -> &str {
        &self.error.message
    }

    /// Returns the parameter at fault, if the error is about one.
    pub(super) fn param(&self) -> Option<&str> {
        self.error.param.as_deref()
    }

    /// Creates the error for a panic or a bug. The reason is only in the log.
    pub(super) fn internal() -> Self {
        let message = "internal error; the server's log has the reason under the request's id";
        Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }

    /// Returns the body of the response, which is also the data of an error event in a stream.
    pub(super) fn body(&self) -> Value {
        let body = ErrorBody { error: self.error.clone() };
        serde_json::to_value(body).expect("a struct of strings becomes JSON")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        // A message may quote the client, which must not be able to forge log lines or fill the log.
        let message: String = self.error.message.escape_debug().take(LOGGED_CHARACTERS).collect();
        let (status, param) = (self.status.as_u16(), self.param());
        match status {
            500 => error!(status, "failed: {message}"),
            501.. => warn!(status, "not served: {message}"),
            _ => info!(status, param, "refused: {message}"),
        }
        let mut response = (self.status, Json(self.body())).into_response();
        let temporary = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::CONFLICT];
        if temporary.contains(&self.status) {
            // OpenAI's clients retry every 429 unless they are told not to.
            let (name, value) = match self.retry {
                Retry::After(seconds) => (header::RETRY_AFTER, HeaderValue::from(seconds)),
                Retry::Never => (HeaderName::from_static("x-should-retry"), HeaderValue::from_static("false")),
            };
            response.headers_mut().insert(name, value);
        }
        // Read by formats with their own error bodies, and by metrics.
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
            StoreError::Conflict { .. } => {
                Self::request(StatusCode::CONFLICT, Some("session"), Some("session_changed"), message)
            }
            StoreError::Answered => {
                let param = Some("idempotency-key");
                Self::request(StatusCode::CONFLICT, param, Some("idempotency_key_in_use"), message)
            }
            StoreError::TextNotKept { .. } => {
                Self::request(StatusCode::NOT_FOUND, Some("version"), Some("text_not_kept"), message)
            }
            StoreError::FarApart { .. } => {
                Self::request(StatusCode::BAD_REQUEST, Some("version"), Some("diff_too_long"), message)
            }
            StoreError::Range { parameter, .. } => Self::invalid(Some(parameter), message),
            StoreError::LongMessages { .. } => Self::invalid(Some("end"), message),
            StoreError::Quota { .. } => Self::request(StatusCode::FORBIDDEN, None, Some("quota_exceeded"), message),
            StoreError::Full { .. } => Self::server(StatusCode::INSUFFICIENT_STORAGE, "store_full", message),
            StoreError::Unavailable { .. } => {
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
            }
            StoreError::Corrupt { .. } => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "snapshot_damaged", message),
            StoreError::TooManyForks { .. } => Self::invalid(Some("n"), message),
            StoreError::TooManyTags { .. } => Self::invalid(Some("name"), message),
            StoreError::FarAncestor { .. } => Self::invalid(Some("with"), message),
            StoreError::Unstorable { .. } => Self::server(StatusCode::INTERNAL_SERVER_ERROR, "state_unfit", message),
            StoreError::Index { .. }
            | StoreError::Database { .. }
            | StoreError::InUse { .. }
            | StoreError::Option { .. } => {
                // Only opening a store reports these.
                Self::internal()
            }
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        Self::about_text(&error, error.parameter(), error.to_string())
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::QueueFull => Self::rate_limit("queue_full", error.to_string()),
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
            Failure::Displaced => Self::rate_limit("queue_full", failure.to_string()),
            Failure::Stalled => Self::server(StatusCode::REQUEST_TIMEOUT, "stalled", failure.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_another_server_has_changed_is_a_conflict_that_says_what_to_do() {
        let head = crate::session::VersionId::new();
        let error = ApiError::from(StoreError::Conflict { head: head.clone() });
        assert_eq!((error.status(), error.code()), (StatusCode::CONFLICT, Some("session_changed")));
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        for part in [head.as_str(), "nothing of the request was stored", "read the session", "send the request again"] {
            assert!(error.message().contains(part), "{}", error.message());
        }
        assert!(error.into_response().headers().contains_key(header::RETRY_AFTER));
        // A client that names a version with `If-Match` gets 412 instead.
        let error = ApiError::from(StoreError::Stale { head });
        assert_eq!((error.status(), error.code()), (StatusCode::PRECONDITION_FAILED, Some("version_mismatch")));
        let error = ApiError::from(StoreError::Answered);
        assert_eq!((error.status(), error.code()), (StatusCode::CONFLICT, Some("idempotency_key_in_use")));
    }

    #[test]
    fn a_grammar_over_its_limits_is_an_invalid_request() {
        let error = ApiError::from(Failure::Grammar);
        assert_eq!((error.status(), error.label()), (StatusCode::BAD_REQUEST, "grammar_limit"));
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
        assert_eq!(ApiError::from(Failure::Internal).status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
