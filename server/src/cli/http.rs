//! The flags of `serve` for HTTP: API keys, CORS, TLS and limits.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tidegate_server::api::Origin;

use super::positive;

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
    /// File with the API keys that requests need, as JSON: {"keys": [{"name": …, "key": … or "sha256": …}]}, with scopes
    /// and quotas where wanted. Read again on SIGHUP.
    #[arg(long, env = "TIDEGATE_API_KEYS_FILE", value_name = "FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// An API key that requests need, or several with commas between them; each opens everything. Better in the
    /// variable than on the command line, which others can see.
    #[arg(long, env = "TIDEGATE_API_KEY", value_name = "KEY", value_delimiter = ',', hide_env_values = true)]
    pub(crate) api_key: Vec<Secret>,
    /// Origin of other pages that may read answers in a browser, such as `https://example.org`; may be given several
    /// times, or with commas. * for all. None where absent.
    #[arg(long, env = "TIDEGATE_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    pub(crate) cors_origin: Vec<Origin>,
    /// Certificate with its chain, as PEM: the server then speaks TLS. Read again on SIGHUP, with the key.
    #[arg(long, env = "TIDEGATE_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the certificate, as PEM.
    #[arg(long, env = "TIDEGATE_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Connections that may be open at once; others wait until one closes.
    #[arg(long, env = "TIDEGATE_MAX_CONNECTIONS", value_name = "COUNT", default_value_t = 4096, value_parser = positive)]
    pub(crate) max_connections: usize,
    /// Time that a request's body may take to come; then the answer is 408.
    #[arg(long, env = "TIDEGATE_BODY_SECONDS", value_name = "SECONDS", default_value_t = 60, value_parser = positive)]
    pub(crate) body_seconds: usize,
    /// Time that a request may make text, its wait for a slot included; then the text ends with what there is, as by
    /// max_tokens. A turn of a conversation has its prompt read first. No bound where absent.
    #[arg(long, env = "TIDEGATE_MAX_SECONDS", value_name = "SECONDS", value_parser = positive)]
    pub(crate) max_seconds: Option<usize>,
}
