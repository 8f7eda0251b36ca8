//! The description of the API: what `#[utoipa::path]` needs besides the wire types, and `GET /openapi.json`.
//!
//! Each route is declared on its handler, each schema on its wire type. [`document`] completes what all routes share.

mod bodies;
mod document;
mod errors;
mod finish;
mod fragments;
pub(super) mod literals;
mod params;
pub(super) mod schemas;

pub(super) use bodies::{Bytes, Events};
pub(super) use document::{Description, description};
pub(super) use errors::{
    AnthropicErrors, BodyErrors, Error, GenerationErrors, IdempotencyErrors, LlamaErrors, LlamaStatus, StoreErrors,
};
pub(super) use fragments::{anything, messages, metadata, nothing, seed, token_ids};
pub(super) use params::{Id, IdempotencyKey, IfMatch, LastEventId, Prefer};
