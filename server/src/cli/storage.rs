//! The flags about keeping conversations, which `serve` and `chat` share.

use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tidegate_server::session::MIN_SECRET;

use super::parse::{Budget, budget, positive, size};

/// The heading of the flags in the help.
pub(super) const HEADING: &str = "Sessions";

fn secret_help() -> String {
    format!("{MIN_SECRET} or more random bytes that sign snapshots and encrypt states kept by clients")
}

/// The flags about keeping conversations.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = HEADING)]
pub(crate) struct SessionArgs {
    /// Folder for sessions [default: $XDG_DATA_HOME/tidegate or ~/.local/share/tidegate]
    #[arg(long, env = "TIDEGATE_DATA_DIR", value_name = "FOLDER")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Acknowledge a turn once it is on disk, or up to a second before (memory)
    #[arg(long, env = "TIDEGATE_DURABILITY", value_enum, default_value_t = DurabilityArg::Turn)]
    pub(crate) durability: DurabilityArg,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Planned memory of the process; what the model and requests leave of it caches states
    #[arg(long, env = "TIDEGATE_RAM_BUDGET", value_name = "SIZE", default_value = "1GiB", value_parser = size)]
    pub(crate) ram_budget: u64,
    /// Disk space for snapshots; to stay below it, old versions are deleted, first those of owners that use most
    #[arg(long, env = "TIDEGATE_DISK_BUDGET", value_name = "SIZE", default_value = "64GiB", value_parser = size)]
    pub(crate) disk_budget: u64,
    /// Disk space of one owner, or its percentage of --disk-budget [default: 25% with several API keys, else 100%]
    #[arg(long, env = "TIDEGATE_OWNER_BUDGET", value_name = "SIZE|PERCENT%", value_parser = budget)]
    pub(crate) owner_budget: Option<Budget>,
    /// Maximum sessions of one owner
    #[arg(long, env = "TIDEGATE_OWNER_SESSIONS", value_name = "COUNT", default_value_t = 100_000, value_parser = positive)]
    pub(crate) owner_sessions: usize,
    /// Versions kept per session, including the current one
    #[arg(long, env = "TIDEGATE_KEEP_VERSIONS", value_name = "COUNT", default_value_t = 16, value_parser = positive)]
    pub(crate) keep_versions: usize,
    /// Keep the texts of sessions and stored responses, so that they can be read back: a few bytes per token
    #[arg(long, env = "TIDEGATE_KEEP_TEXT", value_name = "on|off", value_enum, default_value_t = Switch::On)]
    pub(crate) keep_text: Switch,
    /// Days that a stored response is kept
    #[arg(long, env = "TIDEGATE_RESPONSE_DAYS", value_name = "DAYS", default_value_t = 30, value_parser = positive)]
    pub(crate) response_days: usize,
    /// Maximum memory for the prefix cache; 0 turns it off
    #[arg(long, env = "TIDEGATE_PREFIX_BUDGET", value_name = "SIZE", default_value = "256MiB", value_parser = size)]
    pub(crate) prefix_budget: u64,
    /// Maximum entries of one owner in the prefix cache
    #[arg(long, env = "TIDEGATE_OWNER_PREFIXES", value_name = "COUNT", default_value_t = 128, value_parser = positive)]
    pub(crate) owner_prefixes: usize,
    #[arg(help = secret_help(), long, env = "TIDEGATE_SECRET_FILE", value_name = "FILE")]
    pub(crate) secret_file: Option<PathBuf>,
}

/// Where sessions are stored, if not in the data folder.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Object store for snapshots, as s3://BUCKET/FOLDER (needs the feature `s3`) or file:///FOLDER
    #[arg(long, env = "TIDEGATE_STORE", value_name = "URL")]
    pub(crate) store: Option<String>,
    /// PostgreSQL for sessions, as postgres://USER:PASSWORD@HOST:PORT/DATABASE; several servers may share it and --store
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
}

impl PlaceArgs {
    /// Returns whether sessions are in PostgreSQL, so that no data folder is used.
    pub(crate) fn has_index(&self) -> bool {
        self.index.is_some() || self.index_file.is_some()
    }
}

/// A URL that may contain a password.
#[derive(Clone)]
pub(crate) struct SecretUrl(pub(crate) String);

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretUrl")
    }
}

/// Accepts any text, because clap prints the values that it refuses.
#[expect(clippy::unnecessary_wraps, reason = "clap's parsers may fail")]
fn secret_url(text: &str) -> Result<SecretUrl, Infallible> {
    Ok(SecretUrl(text.to_owned()))
}

// The variants below have no doc comments: with them, clap would list each value on its own line.

/// Whether a feature is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// When a turn is acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityArg {
    Turn,
    Memory,
}
