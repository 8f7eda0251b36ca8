//! Work on the files of a store without a server: checking, repairing, backing up and moving sessions. For sessions
//! that several servers share, verifying and moving them while the servers run.

mod backup;
mod check;
#[cfg(feature = "postgres")]
mod cluster;
mod files;
mod session_file;
#[cfg(all(test, feature = "postgres"))]
mod tests;
mod texts;
mod transfer;

pub use backup::{Copied, backup, restore};
pub use check::{Report, check, repair};
#[cfg(feature = "postgres")]
pub use cluster::{Cluster, Progress, models};
pub use transfer::{Moved, export, import};
