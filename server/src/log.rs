//! The program's log.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::cli::{LogArgs, LogFormat};

/// What is never logged: the client of hubs would write addresses that are secret, and the bytes that it sends, with the token.
const SECRET: [&str; 2] = ["ureq=info", "ureq_proto::util=off"];

/// Starts the log with `--log`, or with the filter `default`.
///
/// # Errors
/// The filter is invalid.
pub(crate) fn start(args: &LogArgs, default: &str) -> Result<()> {
    let filter = args.log.as_deref().unwrap_or(default);
    let mut filter: EnvFilter = filter.parse().with_context(|| format!("--log: invalid filter `{filter}`"))?;
    for target in SECRET {
        filter = filter.add_directive(target.parse()?);
    }
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        // They go to standard error, and writing there panics where it is a file on a full disk.
        .log_internal_errors(false);
    match args.log_format {
        LogFormat::Human => log.init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).init(),
    }
    Ok(())
}
