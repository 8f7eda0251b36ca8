//! Stored conversations. A snapshot is immutable, a session is a named pointer to a snapshot, and a turn is a
//! transaction that moves the pointer.
//!
//! This module knows nothing of HTTP, models or the engine.

mod backend;
mod blocking;
mod cache;
mod conversation;
mod disk;
mod embedded;
mod error;
mod format;
mod hex;
mod id;
mod index;
mod keys;
mod lease;
pub mod maintenance;
mod measured;
mod objects;
mod patch;
mod places;
#[cfg(feature = "postgres")]
mod postgres;
mod prefix;
#[cfg(test)]
pub(crate) mod shared;
mod snapshot;
mod store;
mod tag;
mod text;

pub use backend::{LATENCY_BOUNDS, Latency};
pub use conversation::{Ancestor, Conversation};
pub use disk::{Disk, DiskFile, OpenMode, SystemDisk};
pub use error::StoreError;
pub use format::{Codec, Fingerprint, FormatError};
pub use hex::hex;
pub use id::{Owner, ResponseId, SessionId, VersionId};
pub use keys::{KeyError, Keys, MIN_SECRET};
pub use objects::folder_objects;
pub use patch::{Metadata, Patch};
pub use places::objects_at;
#[cfg(feature = "postgres")]
pub use postgres::PostgresUrl;
pub use prefix::PrefixIndex;
pub use snapshot::{Answer, History, MAX_PENDING, Recent, Snapshot};
pub use store::{
    ChainFrom, Durability, Filter, Fork, Listing, Location, MAX_TEXT_PART, NewResponse, NewSession, Page, Receipt,
    ReceiptKey, Restart, Session, SnapshotCodec, Start, Store, StoreOptions, StoreStats, Tag, Tier, Turn, TurnFork,
    TurnNote, Version,
};
pub use tag::{TagName, VersionRef};
pub use text::{AddedMessage, AddedText, Content, KeptMessage, MessagesPart, PartedTexts, Role, TextPart};
