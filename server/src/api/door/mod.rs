//! The door: who may come in, where to, how often, and from which pages. Everything behind it has been let in.

mod body;
mod cors;
mod keys;
mod quota;
mod routes;
mod scope;
mod visit;

use std::sync::{Arc, PoisonError, RwLock};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Span;

use super::error::ApiError;
use super::owner::credential;
use super::state::AppState;

pub(super) use body::in_time;
pub(super) use cors::cors;
pub use cors::{Origin, OriginError};
use keys::Key;
pub use keys::{Keys, KeysError};
use quota::Refused;
pub(super) use routes::Routes;
pub use scope::{Access, Scope};
pub(super) use visit::{Visit, check_keep, current, may_keep};

/// The keys that open the door; without any it is open to everybody.
#[derive(Default)]
pub(super) struct Door(RwLock<Option<Arc<Keys>>>);

impl Door {
    /// From now on these keys open it and no others. Keys that were there before keep their counts.
    pub(super) fn set(&self, keys: Keys) {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let keys = match current.as_deref() {
            Some(old) => keys.counting_on(old),
            None => keys,
        };
        *current = Some(Arc::new(keys));
    }

    fn keys(&self) -> Option<Arc<Keys>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Lets a request in that may come in; nothing else gets past it.
pub(super) async fn guard(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    let (Some(keys), access) = (state.door().keys(), Access::of(path, request.method())) else {
        return next.run(request).await;
    };
    if access == Access::Open {
        return next.run(request).await;
    }
    let key = match known(&keys, request.headers(), access) {
        Ok(key) => key,
        Err(refusal) => return *refusal,
    };
    Span::current().record("key", key.name());
    let (visit, counted) = match key.limits().enter(request.method() == Method::POST) {
        Ok((place, counted)) => (Arc::new(Visit::new(Arc::clone(key), place)), counted),
        Err(refused) => return limited(key, &refused),
    };
    let mut response = visit::scope(Arc::clone(&visit), next.run(request)).await;
    counted.write(response.headers_mut());
    key.limits().write_tokens(response.headers_mut());
    response
}

/// The key that a request brings, where it opens what the request asks for.
fn known<'k>(keys: &'k Keys, headers: &HeaderMap, access: Access) -> Result<&'k Arc<Key>, Box<Response>> {
    let Some(given) = credential(headers) else {
        let message = "this server wants an API key: `Authorization: Bearer KEY`, or `x-api-key: KEY`";
        return Err(refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", message, "Bearer").into());
    };
    let Some(key) = keys.find(given) else {
        let challenge = r#"Bearer error="invalid_token""#;
        return Err(refusal(StatusCode::UNAUTHORIZED, "invalid_api_key", "this API key is not known", challenge).into());
    };
    match access {
        Access::Needs(scope) if !key.has(scope) => {
            let message = format!("this API key has not the scope `{scope}`, which this path needs");
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

/// The answer to a key that has had enough for now.
fn limited(key: &Key, refused: &Refused) -> Response {
    let mut response = ApiError::limited(refused.message()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::RETRY_AFTER, HeaderValue::from(refused.seconds()));
    refused.counted().write(headers);
    key.limits().write_tokens(headers);
    response
}
