//! Stored conversations. A snapshot is immutable, a session is a named pointer to a snapshot, and a turn is a
//! transaction that moves the pointer.
//!
//! This module knows nothing of HTTP, models or the engine.

mod cache;
mod error;
mod format;
mod hex;
mod id;
mod index;
mod keys;
mod lease;
mod objects;
mod prefix;
mod snapshot;
mod store;

pub use error::StoreError;
pub use format::{Codec, Fingerprint, FormatError};
pub(crate) use hex::hex;
pub use id::{Owner, ResponseId, SessionId, VersionId};
pub use keys::{KeyError, Keys};
pub use prefix::PrefixIndex;
pub use snapshot::{Answer, History, MAX_PENDING, Snapshot};
pub use store::{
    Durability, Fork, Location, Metadata, NewSession, Patch, Receipt, ReceiptKey, Session, SnapshotCodec, Start, Store,
    StoreOptions, StoreStats, Tier, Turn, TurnNote, Version,
};
