//! The HTTP settings of the command line: limits, TLS and API keys. Certificate and keys are read again on SIGHUP; a
//! server without keys on a public address logs a warning.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tidegate_server::api::{Keys, KeysError};
use tidegate_server::{ApiOptions, AppState, ServeOptions, Tls};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::cli::{HttpArgs, ServeArgs};

/// Files that are open beside connections: the index, snapshots, the log.
const OTHER_FILES: usize = 256;

/// The settings of the HTTP side.
pub(crate) fn options(args: &ServeArgs) -> ApiOptions {
    ApiOptions {
        max_body_bytes: args.max_body_bytes,
        body_limit: Duration::from_secs(args.http.body_seconds as u64),
        max_time: args.http.max_seconds.map(|seconds| Duration::from_secs(seconds as u64)),
        cors: args.http.cors_origin.clone(),
        ..ApiOptions::default()
    }
}

/// Files that may be open at once, where the system says so.
fn most_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse().ok())
}

/// How connections are served.
pub(crate) fn serving(args: &HttpArgs) -> Result<ServeOptions> {
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::load(cert, key).context("--tls-cert and --tls-key")?),
        _ => None,
    };
    let mut max_connections = args.max_connections;
    // Where connections take the last of them, the sessions cannot be read any more.
    if let Some(files) = most_files()
        && max_connections > files.saturating_sub(OTHER_FILES)
    {
        max_connections = files.saturating_sub(OTHER_FILES).max(1);
        info!(max_connections, "fewer connections than --max-connections: {files} files may be open (ulimit -n)");
    }
    Ok(ServeOptions { max_connections, tls, ..ServeOptions::default() })
}

/// Sets the API keys, if there are any. Call it before serving.
pub(crate) fn set_api_keys(state: &AppState, args: &HttpArgs, address: SocketAddr) -> Result<()> {
    match keys(args).context("the API keys")? {
        Some(keys) => {
            info!(keys = keys.len(), "requests need an API key");
            state.set_api_keys(keys);
        }
        None if !address.ip().is_loopback() => {
            warn!(
                "everybody who reaches {address} can use this server: it has no API keys (--api-keys-file, --api-key)"
            );
        }
        None => {}
    }
    Ok(())
}

/// Reads again on each SIGHUP what may change while the server runs.
pub(crate) fn reload(state: AppState, tls: Option<Tls>, args: HttpArgs) -> Result<()> {
    if tls.is_none() && args.api_keys_file.is_none() {
        // The signal then means what it always does: the terminal is closed.
        return Ok(());
    }
    let mut asked = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            // Files are read where nobody waits for it.
            let (state, tls, args) = (state.clone(), tls.clone(), args.clone());
            // A panic has been printed, and leaves all as it was.
            let _ = tokio::task::spawn_blocking(move || read_again(&state, tls.as_ref(), &args)).await;
        }
    });
    Ok(())
}

fn read_again(state: &AppState, tls: Option<&Tls>, args: &HttpArgs) {
    match keys(args) {
        Ok(Some(keys)) => {
            let count = keys.len();
            state.set_api_keys(keys);
            info!(keys = count, "SIGHUP: the API keys are read again");
        }
        Ok(None) => {}
        Err(error) => error!("SIGHUP: the API keys stay as they were: {error}"),
    }
    match tls.map(Tls::reload) {
        Some(Ok(())) => info!("SIGHUP: the certificate is read again"),
        Some(Err(error)) => error!("SIGHUP: the certificate stays as it was: {error}"),
        None => {}
    }
}

fn keys(args: &HttpArgs) -> Result<Option<Keys>, KeysError> {
    let given: Vec<String> = args.api_key.iter().map(|key| key.0.clone()).collect();
    Keys::load(args.api_keys_file.as_deref(), &given)
}
