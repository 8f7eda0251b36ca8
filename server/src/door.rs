//! The door's settings as the command line gives them: the keys, read again on SIGHUP, and a warning where there are
//! none and everybody can knock.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use tidegate_server::api::{Keys, KeysError};
use tidegate_server::{ApiOptions, AppState};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{error, info, warn};

use crate::cli::{DoorArgs, ServeArgs};

/// The settings of the HTTP side.
pub(crate) fn options(args: &ServeArgs) -> ApiOptions {
    ApiOptions {
        max_body_bytes: args.max_body_bytes,
        body_limit: Duration::from_secs(args.door.body_seconds as u64),
        max_time: args.door.max_seconds.map(|seconds| Duration::from_secs(seconds as u64)),
        cors: args.door.cors_origin.clone(),
        ..ApiOptions::default()
    }
}

/// Locks the door where there are keys. To be called before anything is served.
pub(crate) fn lock(state: &AppState, args: &DoorArgs, address: SocketAddr) -> Result<()> {
    match keys(args).context("the API keys")? {
        Some(keys) => {
            info!(keys = keys.len(), "requests need an API key");
            state.lock(keys);
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
pub(crate) fn reload(state: AppState, args: DoorArgs) -> Result<()> {
    let mut asked = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        while asked.recv().await.is_some() {
            // Files are read where nobody waits for it.
            let reading = args.clone();
            let read = tokio::task::spawn_blocking(move || keys(&reading)).await;
            match read {
                Ok(Ok(Some(keys))) => {
                    info!(keys = keys.len(), "SIGHUP: the API keys are read again");
                    state.lock(keys);
                }
                Ok(Ok(None)) => info!("SIGHUP: there are no API keys to read again"),
                Ok(Err(error)) => error!("SIGHUP: the API keys stay as they were: {error}"),
                Err(error) => error!("SIGHUP: the API keys stay as they were: {error}"),
            }
        }
    });
    Ok(())
}

fn keys(args: &DoorArgs) -> Result<Option<Keys>, KeysError> {
    let given: Vec<String> = args.api_key.iter().map(|key| key.0.clone()).collect();
    Keys::load(args.api_keys_file.as_deref(), &given)
}
