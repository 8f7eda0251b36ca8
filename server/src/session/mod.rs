//! Conversations that are kept: snapshots, sessions as named pointers to them, turns as transactions.
//!
//! It knows no HTTP, no model and no engine.

mod blobs;
mod cache;
mod error;
mod format;
mod hex;
mod id;
mod index;
mod keys;
mod lease;
mod prefix;
mod snapshot;
mod store;

pub use error::StoreError;
pub use format::{Codec, Fingerprint, FormatError, KeyError, Keys};
pub(crate) use hex::{hex, unhex};
pub use id::{Owner, ResponseId, SessionId, VersionId};
pub use prefix::PrefixIndex;
pub use snapshot::{Answer, History, MAX_PENDING, Snapshot};
pub use store::{
    Durability, Fork, Metadata, NewSession, Patch, Place, Receipt, ReceiptKey, Session, SnapshotCodec, Start, Store,
    StoreOptions, StoreStats, Tier, Turn, TurnNote, Version,
};
