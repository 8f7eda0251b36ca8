//! The session store: one service built on the index, the object store and the in-memory cache.
//!
//! A commit writes the object first, and then everything that points to it, in one index transaction. So whatever the
//! index names exists, and objects that it does not name can be removed.

mod admission;
mod branches;
mod files;
mod forks;
mod held;
mod inner;
mod lineage;
mod load;
mod messages;
mod open;
mod outcome;
mod parked;
mod parted;
mod probe;
mod responses;
mod sessions;
mod shared_sweep;
mod streams;
mod sweep;
#[cfg(test)]
mod tests;
mod texts;
mod turn_forks;
mod turns;
mod types;

pub use inner::Store;
pub use texts::MAX_TEXT_PART;
pub use turn_forks::TurnFork;
pub use turns::{Restart, Turn};
pub use types::{
    ChainFrom, Durability, Filter, Fork, Listing, Location, NewResponse, NewSession, Page, Receipt, ReceiptKey,
    Session, SnapshotCodec, Start, StoreOptions, StoreStats, Tag, Tier, TurnNote, Version,
};
