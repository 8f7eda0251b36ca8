//! The flags of `serve` for HTTP: API keys, browsers, TLS and limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tidegate_server::api::{HostName, Origin};

use super::parse::positive;

/// A string that `Debug` does not print.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) String);

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// The flags of `serve` for HTTP: API keys, CORS, TLS and limits.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Keys and TLS")]
pub(crate) struct HttpArgs {
    /// JSON file with API keys, scopes and quotas; reloaded on SIGHUP
    #[arg(long, env = "TIDEGATE_API_KEYS_FILE", value_name = "FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// API keys with all scopes, separated by commas; prefer the variable, which others cannot see
    #[arg(long, env = "TIDEGATE_API_KEY", value_name = "KEY", value_delimiter = ',', hide_env_values = true)]
    pub(crate) api_key: Vec<Secret>,
    /// Origins whose web pages may call the server, separated by commas; * for all
    #[arg(long, env = "TIDEGATE_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) cors_origin: Vec<Origin>,
    /// Additional host name under which the server answers; may be repeated, or separated by commas
    #[arg(long, env = "TIDEGATE_ALLOWED_HOST", value_name = "NAME", value_delimiter = ',')]
    pub(crate) allowed_host: Vec<HostName>,
    /// Certificate chain as PEM, turns on TLS; reloaded on SIGHUP
    #[arg(long, env = "TIDEGATE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, as PEM
    #[arg(long, env = "TIDEGATE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Additional address, as ADDRESS:PORT, with only health and metrics: no TLS, no keys
    #[arg(long, env = "TIDEGATE_ADMIN_ADDR", help_heading = "Serving", value_name = "ADDRESS")]
    pub(crate) admin_addr: Option<String>,
    /// Maximum open connections; a further one replaces an idle one, or waits
    #[arg(long, env = "TIDEGATE_MAX_CONNECTIONS", help_heading = "Limits", value_name = "COUNT", default_value_t = 4096, value_parser = positive)]
    pub(crate) max_connections: usize,
    /// Maximum open connections of one client [default: a quarter of all; no limit for this machine]
    #[arg(long, env = "TIDEGATE_MAX_CONNECTIONS_PER_PEER", help_heading = "Limits", value_name = "COUNT", value_parser = positive)]
    pub(crate) max_connections_per_peer: Option<usize>,
    /// Seconds for a request body to arrive
    #[arg(long, env = "TIDEGATE_BODY_SECONDS", help_heading = "Limits", value_name = "SECONDS", default_value_t = 60, value_parser = positive)]
    pub(crate) body_seconds: usize,
    /// Seconds for a generation and its wait for a slot; it then ends as if by max_tokens; 0 for no limit
    #[arg(long, env = "TIDEGATE_MAX_SECONDS", help_heading = "Limits", value_name = "SECONDS", default_value_t = 3600)]
    pub(crate) max_seconds: u64,
}

impl HttpArgs {
    /// Returns the admin address. An empty variable overrides one that a container image sets.
    pub(crate) fn admin(&self) -> Option<&str> {
        self.admin_addr.as_deref().filter(|address| !address.is_empty())
    }
}
