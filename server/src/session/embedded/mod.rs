//! The index in a folder: a redb file that lists the sessions and the versions each one points to, and its journal. No
//! redb type leaves this module.

mod ballast;
mod changes;
mod database;
mod error;
mod eviction;
mod expiry;
mod file;
mod index;
mod journal;
mod listing;
mod place;
mod queries;
mod queue;
mod record;
mod recovery;
mod tables;
#[cfg(test)]
mod tests;
mod texts;
mod transaction;
mod writer;

pub(crate) use database::OpenIndex;
pub(crate) use error::IndexError;
pub(crate) use index::EmbeddedIndex;
pub(crate) use listing::{Listing, inspect};
pub(crate) use place::{INDEX, JOURNAL, Place};
pub(crate) use record::read_file as read_journal;
pub(crate) use transaction::Write;
pub(crate) use writer::Writer;
