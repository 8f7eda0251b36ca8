//! The description of the API: what `#[utoipa::path]` needs besides the wire types, and `GET /openapi.json`.
//!
//! Each route is declared on its handler, each schema on its wire type; `document.rs` adds what all routes share.

mod bodies;
pub(super) mod document;
mod errors;
mod finish;
pub(super) mod literals;
mod params;
pub(super) mod schemas;

pub(super) use bodies::{Bytes, Events};
pub(super) use errors::{BodyErrors, Error, GenerationErrors, IdempotencyErrors, StoreErrors, TurnErrors};
pub(super) use params::{Id, IdempotencyKey, IfMatch, LastEventId, Prefer};
