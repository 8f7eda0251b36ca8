//! Conversations that are kept: snapshots, sessions as named pointers to them, turns as transactions.
//!
//! It knows no HTTP, no model and no engine.

mod blobs;
mod cache;
mod error;
mod id;
mod index;
mod lease;
mod snapshot;
mod store;

pub use error::StoreError;
pub use id::{Owner, ResponseId, SessionId, VersionId};
pub use snapshot::{History, OpenAnswer, Snapshot};
pub use store::{
    Durability, Metadata, NewSession, Patch, Place, ReceiptKey, Session, SnapshotCodec, Start, Store, StoreOptions,
    StoreStats, Tier, Turn, TurnNote, Version,
};
