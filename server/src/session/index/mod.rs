//! The index: a redb file that lists the sessions and the versions each one points to. It holds no snapshots, and no
//! type of redb leaves this folder.

mod branches;
mod capacity;
mod changes;
mod database;
mod error;
mod eviction;
mod expiry;
mod file;
mod journal;
mod listing;
mod place;
mod queue;
mod record;
mod recovery;
mod rows;
mod tables;
mod text_row;
mod texts;
mod transaction;
mod writer;

pub(crate) use branches::Bounds;
pub(crate) use capacity::{Limits, Reservation, Shortfall, Victims};
pub(crate) use database::Index;
pub(crate) use error::IndexError;
pub(crate) use expiry::receipt_bytes;
pub(crate) use listing::{Listing, inspect};
pub(crate) use place::{INDEX, JOURNAL, Place};
pub(crate) use record::read_file as read_journal;
pub(crate) use rows::{ResponseRow, SessionRow, VersionRow};
pub(crate) use tables::{ReadOnly, Tables};
pub(crate) use text_row::{EncodedText, TextRow, most_bytes};
pub(crate) use texts::text_bytes;
pub(crate) use transaction::Write;
pub(crate) use writer::Writer;
