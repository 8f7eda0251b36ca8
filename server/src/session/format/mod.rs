//! Snapshots as files. `docs/snapshot-format.md` describes every byte.

mod body;
mod codec;
mod conversation;
mod error;
mod file;
mod header;

pub use codec::{Codec, Fingerprint};
pub use error::FormatError;
pub(crate) use file::check_digest;
