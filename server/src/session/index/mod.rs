//! The index: a redb file that lists the sessions and the versions each one points to. It holds no snapshots, and no
//! type of redb leaves this folder.

mod capacity;
mod database;
mod error;
mod eviction;
mod expiry;
mod rows;
mod tables;
mod transaction;
mod writer;

pub(crate) use capacity::{Limits, Reservation, Shortfall};
pub(crate) use database::Index;
pub(crate) use error::IndexError;
pub(crate) use rows::{ResponseRow, SessionRow, VersionRow};
pub(crate) use tables::{ReadOnly, Tables};
pub(crate) use transaction::Write;
pub(crate) use writer::Writer;
