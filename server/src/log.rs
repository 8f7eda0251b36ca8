//! The program's log.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tidegate_model::Threads;
use tidegate_server::Served;
use tracing::{Level, debug, info};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::cli::{LogArgs, LogFormat};

/// Returns whether an event is never logged, whatever the filter says: the HTTP client of hubs would log secret URLs,
/// and the bytes that it sends, including the token.
fn is_secret(target: &str, level: Level) -> bool {
    target.starts_with("ureq_proto::util") || target.starts_with("ureq") && level > Level::INFO
}

/// Starts the log with the filter of `--log`, or else with the filter `default`.
///
/// # Errors
/// The filter is invalid.
pub(crate) fn start(args: &LogArgs, default: &str) -> Result<()> {
    let filter = args.log.as_deref().unwrap_or(default);
    let filter: EnvFilter = filter.parse().with_context(|| format!("--log: invalid filter `{filter}`"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        // Such errors go to standard error, where writing panics if it is a file on a full disk.
        .log_internal_errors(false);
    // This is a separate filter, because a filter that names a part of the client would take precedence over it.
    let public = filter_fn(|about| !is_secret(about.target(), *about.level()));
    match args.log_format {
        LogFormat::Human => log.finish().with(public).init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).finish().with(public).init(),
    }
    Ok(())
}

/// Logs what was loaded, and the default sampling parameters.
pub(crate) fn served(served: &Served) {
    info!(
        threads = Threads::global().count(),
        slots = served.engine.stats().slots,
        state_bytes = served.state_bytes,
        "model {} on {}",
        served.name,
        served.device
    );
    let sampling = &served.sampling;
    debug!(
        fingerprint = served.fingerprint,
        vocab_size = served.limits.vocab_size,
        eos = ?served.tokenizer.eos(),
        temperature = decimal(sampling.temperature),
        top_p = decimal(sampling.top_p),
        top_k = sampling.top_k,
        min_p = decimal(sampling.min_p),
        repetition_penalty = decimal(sampling.repetition_penalty),
        "model defaults"
    );
}

/// Converts a number to the form that people write: 0.8, where a plain conversion gives 0.800000011920929.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}
