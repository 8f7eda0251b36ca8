//! The flags of `serve` for HTTP: API keys, CORS, TLS and limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tidegate_server::api::Origin;

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
#[command(next_help_heading = "HTTP")]
pub(crate) struct HttpArgs {
    /// JSON file with API keys: {"keys": [{"name": …, "key": … or "sha256": …}]}, optionally with scopes and quotas.
    /// Reloaded on SIGHUP.
    #[arg(long, env = "TIDEGATE_API_KEYS_FILE", value_name = "FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// API key with all scopes; separate several with commas. Prefer the environment variable: other users can see the
    /// command line.
    #[arg(long, env = "TIDEGATE_API_KEY", value_name = "KEY", value_delimiter = ',', hide_env_values = true)]
    pub(crate) api_key: Vec<Secret>,
    /// Origin whose web pages may read responses, such as `https://example.org`; repeat it or separate several with
    /// commas. `*` allows all. [default: none]
    #[arg(long, env = "TIDEGATE_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) cors_origin: Vec<Origin>,
    /// TLS certificate chain, as PEM; turns on TLS. Reloaded on SIGHUP, with the key.
    #[arg(long, env = "TIDEGATE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the TLS certificate, as PEM.
    #[arg(long, env = "TIDEGATE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Maximum open connections; further ones wait until one closes.
    #[arg(long, env = "TIDEGATE_MAX_CONNECTIONS", value_name = "COUNT", default_value_t = 4096, value_parser = positive)]
    pub(crate) max_connections: usize,
    /// Time limit for receiving a request body; then the response is 408.
    #[arg(long, env = "TIDEGATE_BODY_SECONDS", value_name = "SECONDS", default_value_t = 60, value_parser = positive)]
    pub(crate) body_seconds: usize,
    /// Time limit for generating, including the wait for a slot; the text then ends as if max_tokens were reached. A
    /// turn of a session always reads its whole prompt. [default: none]
    #[arg(long, env = "TIDEGATE_MAX_SECONDS", value_name = "SECONDS", value_parser = positive)]
    pub(crate) max_seconds: Option<usize>,
}
