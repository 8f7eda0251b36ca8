//! Refuses requests without a valid key, without the scope of their route, or over their key's quota.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Span;

use super::context::{self, AuthContext};
use super::keys::{Key, Keys};
use super::owner::{self, credential};
use super::quota::QuotaExceeded;
use super::scope::Access;
use crate::api::error::ApiError;
use crate::api::state::AppState;

/// The state of the middleware.
#[derive(Clone)]
pub(in crate::api) struct Auth {
    pub(in crate::api) state: AppState,
    /// The access to each route, by the pattern of its path.
    pub(in crate::api) access: &'static BTreeMap<String, Access>,
}

/// Middleware that passes on the requests that are allowed and refuses all others.
pub(in crate::api) async fn authorize(State(auth): State<Auth>, request: Request, next: Next) -> Response {
    let Some(keys) = auth.state.api_keys().get() else {
        let headers = request.headers().clone();
        return owner::with(&headers, next.run(request)).await;
    };
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let access =
        path.and_then(|path| auth.access.get(path)).map_or(Access::AnyKey, |it| it.with_method(request.method()));
    if access == Access::Public {
        return next.run(request).await;
    }
    let key = match authenticate(&keys, request.headers(), access) {
        Ok(key) => key,
        Err(refusal) => return *refusal,
    };
    Span::current().record("key", key.name());
    let (context, requests) = match key.quota().admit(request.method() == Method::POST) {
        Ok((permit, requests)) => (Arc::new(AuthContext::new(Arc::clone(key), permit)), requests),
        Err(exceeded) => return quota_exceeded(key, &exceeded),
    };
    let mut response = context::with(Arc::clone(&context), next.run(request)).await;
    requests.write(response.headers_mut());
    key.quota().write_tokens(response.headers_mut());
    response
}

/// Returns the key of a request, if the key has access to the route.
fn authenticate<'k>(keys: &'k Keys, headers: &HeaderMap, access: Access) -> Result<&'k Arc<Key>, Box<Response>> {
    let Some(given) = credential(headers) else {
        let message = "an API key is required: `Authorization: Bearer KEY` or `x-api-key: KEY`";
        return Err(refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", message, "Bearer").into());
    };
    let Some(key) = keys.find(given) else {
        let challenge = r#"Bearer error="invalid_token""#;
        return Err(refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", "unknown API key", challenge).into());
    };
    match access {
        Access::Scope(scope) if !key.has(scope) => {
            let message = format!("this API key lacks the scope `{scope}`, which this path requires");
            let challenge = format!(r#"Bearer error="insufficient_scope", scope="{scope}""#);
            Err(refusal(StatusCode::FORBIDDEN, "insufficient_scope", &message, &challenge).into())
        }
        _ => Ok(key),
    }
}

fn refusal(status: StatusCode, code: &'static str, message: &str, challenge: &str) -> Response {
    let mut response = ApiError::request(status, None, Some(code), message).into_response();
    if let Ok(challenge) = HeaderValue::from_str(challenge) {
        response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
    }
    response
}

/// Creates the response to a request over its key's quota.
fn quota_exceeded(key: &Key, exceeded: &QuotaExceeded) -> Response {
    let mut response = ApiError::rate_limit("rate_limit_exceeded", exceeded.message()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::RETRY_AFTER, HeaderValue::from(exceeded.retry_after()));
    exceeded.requests().write(headers);
    key.quota().write_tokens(headers);
    response
}
