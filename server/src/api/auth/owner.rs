//! The owner of what a request creates. Requests with the same key, or the same bearer token, have the same owner.

use std::convert::Infallible;
use std::future::Future;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};

use super::context;
use crate::session::Owner;

/// Extracts the owner of a request. With API keys, it is derived from the key's name. Without them, it is a digest of
/// the credential, which is not stored, and all requests without a credential share one owner.
#[derive(Clone, Copy, Debug)]
pub(in crate::api) struct Caller(pub(in crate::api) Owner);

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        if let Some(context) = context::current() {
            return Ok(Self(context.owner()));
        }
        Ok(Self(of_credential(&parts.headers)))
    }
}

tokio::task_local! {
    static OWNER: Owner;
}

/// Runs `request`, which has no key, with the owner of its `headers` as its task's [`current`].
pub(super) async fn with<F: Future>(headers: &HeaderMap, request: F) -> F::Output {
    OWNER.scope(of_credential(headers), request).await
}

/// Returns the owner of the request that this task serves, in whose name it takes turns at shared resources.
pub(in crate::api) fn current() -> Owner {
    context::current().map_or_else(|| OWNER.try_with(|owner| *owner).unwrap_or_default(), |context| context.owner())
}

/// Returns the owner of a request without a key: a digest of its credential.
fn of_credential(headers: &HeaderMap) -> Owner {
    let Some(token) = credential(headers) else { return Owner::default() };
    let digest = Sha256::new().chain_update("tidegate owner\0").chain_update(token).finalize();
    let mut owner = [0; 16];
    owner.copy_from_slice(&digest[..16]);
    Owner(owner)
}

/// Returns the credential of a request: the bearer token or other content of `Authorization`, or else `x-api-key`,
/// which Anthropic's clients send.
pub(super) fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let Some(value) = headers.get(AUTHORIZATION) else { return headers.get("x-api-key").map(HeaderValue::as_bytes) };
    let value = value.as_bytes();
    Some(match value.split_first_chunk::<7>() {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => token.trim_ascii(),
        _ => value,
    })
}
