//! The flags of `sessions`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::storage::PlaceArgs;

/// Shown below the commands by `sessions --help`.
const NOTES: &str = "\
Without --index, all but `backup` need a folder that no server uses. With --index and --store, `verify`, `export` and
`import` work on the sessions that several servers share, also while these run. To move sessions, export and import them.
If a server has --store without --index, only its index and journal are verified and copied.
Exit codes: 0 nothing is wrong, 1 problems or an error.";

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

impl SessionsCommand {
    /// Returns where the sessions that several servers share are, if the command works on those; `None` for a folder.
    pub(crate) fn shared(&self) -> Option<&PlaceArgs> {
        let (Self::Verify(place) | Self::Export { place, .. } | Self::Import { place, .. }) = self else {
            return None;
        };
        Some(place).filter(|place| place.has_index())
    }
}

/// What to do with the sessions.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Check the index, its journal and every snapshot; list what is wrong, change nothing
    #[command(visible_alias = "check")]
    Verify(PlaceArgs),
    /// Rebuild a damaged index or journal from the other; rewind sessions whose snapshot is lost
    Repair,
    /// Write every session as a JSON file, and its snapshots as files
    Export {
        /// Folder to write to
        to: PathBuf,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Add exported sessions under the same ids
    Import {
        /// Folder that `export` wrote
        from: PathBuf,
        #[command(flatten)]
        place: PlaceArgs,
    },
    /// Copy all sessions, even while a server runs; copies only what an earlier backup there lacks
    Backup {
        /// Folder of the backup
        to: PathBuf,
    },
    /// Restore a backup into an empty data folder
    Restore {
        /// Folder that `backup` wrote
        from: PathBuf,
    },
}
