//! Work on the files of a store without a server: checking, repairing, backing up, and moving sessions.

mod backup;
mod check;
mod files;
mod session_file;
mod texts;
mod transfer;

pub use backup::{Copied, backup, restore};
pub use check::{Report, check, repair};
pub use transfer::{Moved, export, import};
