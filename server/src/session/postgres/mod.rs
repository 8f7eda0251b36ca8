//! The index in PostgreSQL, which several servers share: one schema per model. No tokio-postgres type leaves this
//! folder.
//!
//! A transaction locks its owner's row and reads what it needs (`reads.rs`), decides in memory (`work.rs`), and writes
//! what has changed (`writes.rs`), in two round trips.

mod address;
mod background;
mod connection;
mod database;
mod eviction;
mod expiry;
mod failure;
mod health;
mod index;
mod migrations;
mod open;
mod queries;
mod reads;
mod rows;
mod servers;
mod space;
#[cfg(test)]
pub(crate) mod tests;
mod tls;
mod totals;
mod transfer;
mod work;
mod writes;

pub use address::PostgresUrl;
pub(crate) use index::PostgresIndex;
pub(crate) use open::{PostgresOptions, patiently};
pub(crate) use transfer::models;
