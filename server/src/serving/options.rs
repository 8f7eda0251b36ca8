//! The options for serving connections.

use std::time::Duration;

use super::tls::Tls;

/// The options for serving connections.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Maximum number of open connections. A further one replaces an idle one, or waits if none is idle.
    pub max_connections: usize,
    /// Maximum number of connections per client; a client is an IPv4 address or an IPv6 /64 network. A further one
    /// replaces an idle one of the same client, or is closed if none is idle. `None` means a quarter of
    /// `max_connections`, and no limit for loopback addresses.
    pub max_connections_per_peer: Option<usize>,
    /// Time limit for the head of a request to arrive, including the idle time before it.
    pub header_timeout: Duration,
    /// Time limit for a client to read some of the data sent to it.
    pub write_timeout: Duration,
    /// Time limit for a TLS handshake.
    pub handshake_timeout: Duration,
    /// The certificate; plain HTTP if `None`.
    pub tls: Option<Tls>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_connections_per_peer: None,
            // Longer than the 60 s for which proxies keep connections open, so that none is closed just as a request
            // arrives.
            header_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_mins(1),
            handshake_timeout: Duration::from_secs(10),
            tls: None,
        }
    }
}
