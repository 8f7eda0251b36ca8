//! Whose a request is: who comes with the same key, or knows the same bearer token, owns the same things.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};

use super::door;
use super::state::AppState;
use crate::session::Owner;

/// The owner that a request acts for: where the server has keys, the name of the request's; where it has none, a digest
/// of its credential, which is nowhere kept, and everybody without one is one and the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller(pub(super) Owner);

impl FromRequestParts<AppState> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Infallible> {
        if let Some(visit) = door::current() {
            return Ok(Self(visit.owner()));
        }
        let Some(token) = credential(&parts.headers) else { return Ok(Self(Owner::default())) };
        let digest = Sha256::new().chain_update("tidegate owner\0").chain_update(token).finalize();
        let mut owner = [0; 16];
        owner.copy_from_slice(&digest[..16]);
        Ok(Self(Owner(owner)))
    }
}

/// What a request shows of itself: its bearer token, whatever else its `Authorization` says, or, where it has none, its
/// `x-api-key`, as Anthropic's clients send it.
pub(super) fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let Some(value) = headers.get(AUTHORIZATION) else { return headers.get("x-api-key").map(HeaderValue::as_bytes) };
    let value = value.as_bytes();
    Some(match value.split_first_chunk::<7>() {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => token.trim_ascii(),
        _ => value,
    })
}
