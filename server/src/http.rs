//! The HTTP settings of the command line: limits, TLS, API keys and the admin address. Also reloads keys, certificate
//! and models on SIGHUP, and warns about a server without keys on a public address.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tidegate_server::api::{AllowedHosts, Keys, KeysError};
use tidegate_server::{ApiOptions, AppState, ServeOptions, Tls, admin_app, serve_with};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;
use tracing::{debug, error, info, warn};

use crate::cli::{HttpArgs, ServeArgs};
use crate::models;

/// File descriptors reserved for the index, snapshots and the log.
const RESERVED_FILES: usize = 256;

/// Maximum number of connections of probes and scrapers. Idle ones are closed for new ones.
const ADMIN_CONNECTIONS: usize = 64;

/// Logs the settings.
pub(crate) fn log_settings(args: &HttpArgs) {
    debug!(
        api_keys_file = args.api_keys_file.as_deref().map(|file| tracing::field::display(file.display())),
        api_keys_given = args.api_key.len(),
        cors_origins = ?args.cors_origin,
        allowed_hosts = ?args.allowed_host,
        tls_cert = args.tls_cert.as_deref().map(|file| tracing::field::display(file.display())),
        admin_addr = args.admin_addr,
        max_connections = args.max_connections,
        max_connections_per_peer = args.max_connections_per_peer,
        body_seconds = args.body_seconds,
        max_seconds = args.max_seconds,
        "HTTP settings"
    );
}

/// Returns the options of the API.
pub(crate) fn api_options(args: &ServeArgs, address: SocketAddr) -> ApiOptions {
    ApiOptions {
        max_body_bytes: args.max_body_bytes,
        body_limit: Duration::from_secs(args.http.body_seconds as u64),
        max_time: (args.http.max_seconds > 0).then(|| Duration::from_secs(args.http.max_seconds)),
        cors: args.http.cors_origin.clone(),
        hosts: AllowedHosts::new(args.http.allowed_host.clone(), address.ip()),
        metrics_at_admin: args.http.admin().is_some(),
        ..ApiOptions::default()
    }
}

/// Raises this process's limit on open files as far as allowed, and returns it; `None` if there is no limit.
fn raise_open_files() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let limit = if raised { maximum } else { current };
    limit.map(|files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// Returns the options of the listener.
pub(crate) fn serve_options(args: &HttpArgs) -> Result<ServeOptions> {
    let tls = match (&args.tls_cert, &args.tls_key) {
        (Some(cert), Some(key)) => Some(Tls::load(cert, key).context("--tls-cert and --tls-key")?),
        _ => None,
    };
    let mut max_connections = args.max_connections;
    // If connections used up all file descriptors, sessions could not be read.
    if let Some(files) = raise_open_files()
        && max_connections > files.saturating_sub(RESERVED_FILES)
    {
        max_connections = files.saturating_sub(RESERVED_FILES).max(1);
        warn!(max_connections, "--max-connections is lowered: the limit on open files is {files} (ulimit -Hn)");
    }
    let max_connections_per_peer = args.max_connections_per_peer;
    Ok(ServeOptions { max_connections, max_connections_per_peer, tls, ..ServeOptions::default() })
}

/// Serves health, readiness and metrics at `--admin-addr`, if it is given. The admin server has its own thread and its
/// own connections, so that it answers whatever clients do to the API.
pub(crate) fn serve_admin(args: &HttpArgs, state: &AppState) -> Result<()> {
    let Some(address) = args.admin() else { return Ok(()) };
    let what = || format!("--admin-addr {address}: cannot listen there");
    let listener = std::net::TcpListener::bind(address).with_context(what)?;
    listener.set_nonblocking(true).with_context(what)?;
    let bound = listener.local_addr().with_context(what)?;
    let app = admin_app(state.clone(), bound.ip());
    let options = ServeOptions { max_connections: ADMIN_CONNECTIONS, ..ServeOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let serving = async move { serve_with(options, TcpListener::from_std(listener)?, app, pending()).await };
    let run = move || {
        if let Err(error) = runtime.block_on(serving) {
            error!("the admin address stopped answering: {error}");
        }
    };
    std::thread::Builder::new().name("admin".to_owned()).spawn(run).context("cannot start the admin thread")?;
    info!("health and metrics at http://{bound}, without API keys");
    Ok(())
}

/// Sets the API keys, if there are any, and returns their number. Call this before serving.
pub(crate) fn set_api_keys(state: &AppState, args: &HttpArgs, address: SocketAddr) -> Result<usize> {
    let keys = keys(args).context("the API keys")?;
    let count = keys.as_ref().map_or(0, Keys::len);
    match keys {
        Some(keys) => {
            debug!(keys = count, "requests require an API key");
            state.set_api_keys(keys);
        }
        None if !address.ip().is_loopback() => {
            warn!(
                "anyone who can reach {address} can use this server: no API keys are set (--api-keys-file, --api-key)"
            );
        }
        None => {}
    }
    Ok(count)
}

/// Reloads the API keys, the certificate and, if there are `several` models, their list on each SIGHUP.
pub(crate) fn reload_on_sighup(state: AppState, tls: Option<Tls>, args: ServeArgs, several: bool) -> Result<()> {
    if tls.is_none() && args.http.api_keys_file.is_none() && !several {
        // With nothing to reload, SIGHUP keeps its default action: it ends the process when the terminal closes.
        return Ok(());
    }
    let mut hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    let list = Arc::new(Notify::new());
    if several {
        tokio::spawn(reload_models(state.clone(), args.clone(), Arc::clone(&list)));
    }
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            // Reading files may block.
            let (reloaded, tls, http) = (state.clone(), tls.clone(), args.http.clone());
            // The panic hook logs a panic, which otherwise changes nothing.
            let _ = tokio::task::spawn_blocking(move || reload(&reloaded, tls.as_ref(), &http)).await;
            list.notify_one();
        }
    });
    Ok(())
}

/// Reloads the list of models on each request. This runs separately from the other reloads, which must not wait for
/// downloads. All requests during a reload together cause one more reload.
async fn reload_models(state: AppState, args: ServeArgs, asked: Arc<Notify>) {
    loop {
        asked.notified().await;
        let args = args.clone();
        match models::apart(move || models::sources(models::listed(&args)?)).await {
            Ok(sources) => {
                let count = sources.len();
                let loaded = state.reload_models(sources).await;
                info!(models = count, ?loaded, "SIGHUP: reloaded the list of models");
            }
            Err(error) => error!("SIGHUP: kept the previous models: {error:#}"),
        }
    }
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
