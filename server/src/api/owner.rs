//! Whose a request is: who knows the same bearer token owns the same things.

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use sha2::{Digest, Sha256};

use super::error::ApiError;
use super::state::AppState;
use crate::session::Owner;

/// The owner that a request acts for: a digest of its bearer token, which is nowhere kept; everybody without a token
/// is one and the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller(pub(super) Owner);

impl FromRequestParts<AppState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &AppState) -> Result<Self, ApiError> {
        let Some(value) = parts.headers.get(AUTHORIZATION) else { return Ok(Self(Owner::default())) };
        let token = value.to_str().ok().and_then(|value| value.split_once(' '));
        match token {
            Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty() => {
                let digest = Sha256::new().chain_update("tidegate owner\0").chain_update(token.trim()).finalize();
                let mut owner = [0; 16];
                owner.copy_from_slice(&digest[..16]);
                Ok(Self(Owner(owner)))
            }
            _ => Err(ApiError::invalid(None, "the authorization header must be `Bearer` and a token")),
        }
    }
}
