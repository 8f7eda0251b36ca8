//! The flags of `sessions`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::storage::{SecretUrl, secret_url};

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

/// Where the sessions of several servers are, if the command is about these.
#[derive(Clone, Debug, Args)]
pub(crate) struct ClusterArgs {
    /// PostgreSQL of several servers, as postgres://USER:PASSWORD@HOST:PORT/DATABASE, instead of a folder
    #[arg(
        long,
        env = "TIDEGATE_INDEX",
        hide_env_values = true,
        value_name = "URL",
        value_parser = secret_url,
        requires = "store",
        conflicts_with = "index_file"
    )]
    pub(crate) index: Option<SecretUrl>,
    /// File with the URL of --index
    #[arg(long, env = "TIDEGATE_INDEX_FILE", value_name = "FILE", requires = "store")]
    pub(crate) index_file: Option<PathBuf>,
    /// Object store of these servers, as s3://BUCKET/FOLDER (needs the feature `s3`) or file:///FOLDER
    #[arg(long, env = "TIDEGATE_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
}

impl SessionsCommand {
    /// The servers that the command is about; `None` for a folder.
    pub(crate) fn cluster(&self) -> Option<&ClusterArgs> {
        let (Self::Verify(cluster) | Self::Export { cluster, .. } | Self::Import { cluster, .. }) = self else {
            return None;
        };
        Some(cluster).filter(|args| args.index.is_some() || args.index_file.is_some())
    }
}

/// What to do with the sessions.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Check the index, its journal and every snapshot; list what is wrong, and change nothing
    #[command(visible_alias = "check")]
    Verify(ClusterArgs),
    /// Rebuild a damaged index or journal from the other; rewind sessions whose snapshot is lost
    Repair,
    /// Write every session as a JSON file, and its snapshots as files
    Export {
        /// Folder to write to
        to: PathBuf,
        #[command(flatten)]
        cluster: ClusterArgs,
    },
    /// Add exported sessions under the same ids
    Import {
        /// Folder that `export` wrote
        from: PathBuf,
        #[command(flatten)]
        cluster: ClusterArgs,
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
