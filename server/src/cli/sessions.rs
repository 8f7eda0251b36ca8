//! The flags of `sessions`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Shown below the commands by `sessions --help`.
const NOTES: &str = "\
All but `backup` need a folder that no server uses. Exit codes: 0 nothing is wrong, 1 problems or an error.
With --store, the snapshots are in the object store, and only index and journal are checked and copied.";

/// The flags of `sessions`.
#[derive(Clone, Debug, Args)]
#[command(after_help = NOTES)]
pub(crate) struct SessionsArgs {
    /// Folder of the sessions [default: $XDG_DATA_HOME/tidegate or ~/.local/share/tidegate]
    #[arg(long, env = "TIDEGATE_DATA_DIR", value_name = "FOLDER", global = true)]
    pub(crate) data_dir: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: SessionsCommand,
}

/// What to do with the sessions.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Check the index, its journal and every snapshot; list what is wrong
    Check,
    /// Rebuild a damaged index or journal from the other; rewind sessions whose snapshot is lost
    Repair,
    /// Write every session as a JSON file, and its snapshots as files
    Export {
        /// Folder to write to
        to: PathBuf,
    },
    /// Add exported sessions under the same ids
    Import {
        /// Folder that `export` wrote
        from: PathBuf,
    },
    /// Copy all sessions, also while a server runs; copies only what an earlier backup there lacks
    Backup {
        /// Folder of the backup
        to: PathBuf,
    },
    /// Make an empty data folder from a backup
    Restore {
        /// Folder that `backup` wrote
        from: PathBuf,
    },
}
