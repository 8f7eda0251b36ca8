//! The HTTP settings of the command line: limits, TLS and API keys. Certificate and keys are read again on SIGHUP; a
//! server without keys on a public address logs a warning.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tidegate_server::api::{Keys, KeysError};
use tidegate_server::{ApiOptions, AppState, ServeOptions, Tls};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{debug, error, info, warn};

use crate::cli::{HttpArgs, ServeArgs};

/// File descriptors reserved for the index, snapshots and the log.
const RESERVED_FILES: usize = 256;

/// The options of the API.
pub(crate) fn api_options(args: &ServeArgs) -> ApiOptions {
    ApiOptions {
        max_body_bytes: args.max_body_bytes,
        body_limit: Duration::from_secs(args.http.body_seconds as u64),
        max_time: args.http.max_seconds.map(|seconds| Duration::from_secs(seconds as u64)),
        cors: args.http.cors_origin.clone(),
        ..ApiOptions::default()
    }
}

/// The limit on open files, where the system has one.
fn max_open_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse().ok())
}

/// The options of the listener.
pub(crate) fn serve_options(args: &HttpArgs) -> Result<ServeOptions> {
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::load(cert, key).context("--tls-cert and --tls-key")?),
        _ => None,
    };
    let mut max_connections = args.max_connections;
    // If connections used up all descriptors, sessions could not be read.
    if let Some(files) = max_open_files()
        && max_connections > files.saturating_sub(RESERVED_FILES)
    {
        max_connections = files.saturating_sub(RESERVED_FILES).max(1);
        debug!(max_connections, "--max-connections is lowered: the limit on open files is {files} (ulimit -n)");
    }
    Ok(ServeOptions { max_connections, tls, ..ServeOptions::default() })
}

/// Sets the API keys, if there are any. Call it before serving.
pub(crate) fn set_api_keys(state: &AppState, args: &HttpArgs, address: SocketAddr) -> Result<()> {
    match keys(args).context("the API keys")? {
        Some(keys) => {
            debug!(keys = keys.len(), "requests require an API key");
            state.set_api_keys(keys);
        }
        None if !address.ip().is_loopback() => {
            warn!(
                "anyone who can reach {address} can use this server: no API keys are set (--api-keys-file, --api-key)"
            );
        }
        None => {}
    }
    Ok(())
}

/// Reloads the API keys and the certificate on each SIGHUP.
pub(crate) fn reload_on_sighup(state: AppState, tls: Option<Tls>, args: HttpArgs) -> Result<()> {
    if tls.is_none() && args.api_keys_file.is_none() {
        // Without either file, SIGHUP keeps its usual meaning: the terminal is closed.
        return Ok(());
    }
    let mut hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            // Reading files may block.
            let (state, tls, args) = (state.clone(), tls.clone(), args.clone());
            // A panic is logged by its hook and changes nothing.
            let _ = tokio::task::spawn_blocking(move || reload(&state, tls.as_ref(), &args)).await;
        }
    });
    Ok(())
}

fn reload(state: &AppState, tls: Option<&Tls>, args: &HttpArgs) {
    match keys(args) {
        Ok(Some(keys)) => {
            let count = keys.len();
            state.set_api_keys(keys);
            info!(keys = count, "SIGHUP: reloaded the API keys");
        }
        Ok(None) => {}
        Err(error) => error!("SIGHUP: kept the previous API keys: {error}"),
    }
    match tls.map(Tls::reload) {
        Some(Ok(())) => info!("SIGHUP: reloaded the certificate"),
        Some(Err(error)) => error!("SIGHUP: kept the previous certificate: {error}"),
        None => {}
    }
}

fn keys(args: &HttpArgs) -> Result<Option<Keys>, KeysError> {
    let given: Vec<String> = args.api_key.iter().map(|key| key.0.clone()).collect();
    Keys::load(args.api_keys_file.as_deref(), &given)
}
