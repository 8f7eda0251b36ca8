//! Conversations that are kept: snapshots, sessions as named pointers to them, turns as transactions.
//!
//! It knows no HTTP, no model and no engine.

mod format;
mod keys;
mod snapshot;

pub use format::{Codec, Fingerprint, FormatError, KeyError, Keys};
pub use snapshot::{Answer, History, MAX_PENDING, Snapshot};
