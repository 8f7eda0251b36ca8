//! Conversations that are kept: snapshots, sessions as named pointers to them, turns as transactions.
//!
//! It knows no HTTP, no model and no engine.

mod snapshot;

pub use snapshot::{History, OpenAnswer, Snapshot};
