//! Conversations that are kept: snapshots, sessions as named pointers to them, turns as transactions.
//!
//! It knows no HTTP, no model and no engine.

mod error;
mod format;
mod id;
mod keys;
mod prefix;
mod snapshot;
mod stub;

pub use error::StoreError;
pub use format::{Codec, Fingerprint, FormatError, KeyError, Keys};
pub use id::{Owner, ResponseId, SessionId, VersionId};
pub use prefix::PrefixIndex;
pub use snapshot::{Answer, History, MAX_PENDING, Snapshot};
pub use stub::*;
