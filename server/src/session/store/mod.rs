//! The store of sessions: one service on top of the index, the objects and the cache in memory.
//!
//! A commit writes the object first, and then, in one transaction of the index, everything that points to it. So
//! whatever the index names exists, and objects that it does not name can be removed.

mod admission;
mod ballast;
mod forks;
mod inner;
mod load;
mod open;
mod responses;
mod sessions;
mod sweep;
mod turns;
mod types;

pub use inner::Store;
pub use turns::Turn;
pub use types::{
    Durability, Fork, Location, Metadata, NewSession, Patch, Receipt, ReceiptKey, Session, SnapshotCodec, Start,
    StoreOptions, StoreStats, Tier, TurnNote, Version,
};
