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

/// Whether something is never logged, whatever the filter says: the client of hubs would write addresses that are secret, and
/// the bytes that it sends, with the token.
fn is_secret(target: &str, level: Level) -> bool {
    target.starts_with("ureq_proto::util") || target.starts_with("ureq") && level > Level::INFO
}

/// Starts the log with `--log`, or with the filter `default`.
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
        // They go to standard error, and writing there panics where it is a file on a full disk.
        .log_internal_errors(false);
    // Beside the filter, because one that names a part of the client would have precedence in it.
    let public = filter_fn(|about| !is_secret(about.target(), *about.level()));
    match args.log_format {
        LogFormat::Human => log.finish().with(public).init(),
        LogFormat::Json => log.json().flatten_event(true).with_span_list(false).finish().with(public).init(),
    }
    Ok(())
}

/// What a model that has been loaded is, and how it samples unless a request says otherwise.
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

/// A number as people write it: 0.8, where a plain conversion gives 0.800000011920929.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}
