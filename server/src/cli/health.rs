//! The flags of `health`, which `serve` has as well.

use clap::Args;

use super::parse::{DEFAULT_PORT, port};

/// The flags of `health`: where the server listens.
#[derive(Clone, Debug, Args)]
pub(crate) struct HealthArgs {
    /// Address that the server listens on
    #[arg(long, env = "TIDEGATE_HOST", default_value = "127.0.0.1")]
    pub(crate) host: String,
    /// Port that the server listens on
    #[arg(long, env = "TIDEGATE_PORT", default_value_t = DEFAULT_PORT, value_parser = port)]
    pub(crate) port: u16,
    /// The server's admin address for health and metrics, if it has one; needed if the main address uses TLS
    #[arg(long, env = "TIDEGATE_ADMIN_ADDR", value_name = "ADDRESS")]
    pub(crate) admin_addr: Option<String>,
}

impl HealthArgs {
    /// Returns the admin address. An empty variable overrides one that a container image sets.
    pub(crate) fn admin(&self) -> Option<&str> {
        self.admin_addr.as_deref().filter(|address| !address.is_empty())
    }
}
