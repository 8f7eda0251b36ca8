//! Options for serving connections.

use std::time::Duration;

use super::tls::Tls;

/// Options for connections.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Most connections open at once. A further one takes the place of an idle one, or waits if there is none.
    pub max_connections: usize,
    /// Most connections of one client, which is an IPv4 address or an IPv6 network of 64 bits. A further one takes the place
    /// of an idle one of the same client, or is closed. `None`: a quarter of `max_connections`, and any number from
    /// loopback addresses.
    pub max_connections_per_peer: Option<usize>,
    /// Time within which the head of a request must arrive, including idle time before it.
    pub header_timeout: Duration,
    /// Time within which a client must read some of the data sent to it.
    pub write_timeout: Duration,
    /// Time within which a TLS handshake must finish.
    pub handshake_timeout: Duration,
    /// The certificate; plain HTTP if `None`.
    pub tls: Option<Tls>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            max_connections_per_peer: None,
            // Longer than the 60 s for which proxies keep connections, so that none is closed when a request arrives.
            header_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_mins(1),
            handshake_timeout: Duration::from_secs(10),
            tls: None,
        }
    }
}
