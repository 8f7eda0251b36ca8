//! Whose a request is: who knows the same bearer token owns the same things.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use sha2::{Digest, Sha256};

use super::state::AppState;
use crate::session::Owner;

/// The owner that a request acts for: a digest of its bearer token, or of whatever else its `Authorization` says,
/// which is nowhere kept; everybody without one is one and the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller(pub(super) Owner);

impl FromRequestParts<AppState> for Caller {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, Infallible> {
        let Some(value) = parts.headers.get(AUTHORIZATION) else { return Ok(Self(Owner::default())) };
        let value = value.as_bytes();
        let token = match value.split_first_chunk::<7>() {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case(b"bearer ") => token.trim_ascii(),
            _ => value,
        };
        let digest = Sha256::new().chain_update("tidegate owner\0").chain_update(token).finalize();
        let mut owner = [0; 16];
        owner.copy_from_slice(&digest[..16]);
        Ok(Self(Owner(owner)))
    }
}
