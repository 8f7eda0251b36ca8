//! The serving loop: connections, how many there may be, and how long each may be silent. What is said on them is the
//! application's.
//!
//! HTTP/1.1 alone: a server of streams gains nothing by several on one connection, and a reader that is slow must hold
//! up nothing but itself.

mod listener;
mod tls;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum_server::tls_rustls::RustlsAcceptor;
use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use tokio::net::TcpListener;

use listener::{Doorway, Peer};
pub use tls::{Tls, TlsError};

/// Longest head of a request; a longer one is answered 431.
const MOST_HEAD_BYTES: usize = 32 << 10;

/// How connections are served.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Connections that may be open at once; others wait until one closes.
    pub max_connections: usize,
    /// Time that the head of a request may take to come, and that a connection may lie idle before it.
    pub head_limit: Duration,
    /// Time in which a client has to read some of what is written to it.
    pub write_limit: Duration,
    /// Time that a TLS handshake may take.
    pub handshake_limit: Duration,
    /// The certificate; plain HTTP where there is none.
    pub tls: Option<Tls>,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            max_connections: 4096,
            // Longer than the 60 s for which proxies keep theirs: a connection is not closed under a request.
            head_limit: Duration::from_secs(75),
            write_limit: Duration::from_mins(1),
            handshake_limit: Duration::from_secs(10),
            tls: None,
        }
    }
}

/// Serves `app` until `shutdown` ends; requests that run then are finished.
///
/// # Errors
/// The listener failed.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    serve_with(ServeOptions::default(), listener, app, shutdown).await
}

/// The same as `options` say.
///
/// # Errors
/// The listener failed.
pub async fn serve_with(
    options: ServeOptions,
    listener: TcpListener,
    app: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let handle = Handle::new();
    let listener = Doorway::new(listener, options.max_connections, options.write_limit);
    let mut server = Server::<Peer>::from_listener(listener).handle(handle.clone());
    let mut http = server.http_builder().http1();
    http.timer(TokioTimer::new()).header_read_timeout(options.head_limit).max_buf_size(MOST_HEAD_BYTES);
    let app = app.into_make_service();
    match options.tls {
        None => until(server.http1_only().serve(app), handle, shutdown).await,
        Some(tls) => {
            let acceptor = RustlsAcceptor::new(tls.config()).handshake_timeout(options.handshake_limit);
            until(server.acceptor(acceptor).http1_only().serve(app), handle, shutdown).await
        }
    }
}

/// Serves until `shutdown` ends, and then until all connections have.
async fn until(
    serving: impl Future<Output = io::Result<()>>,
    handle: Handle<Peer>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let mut serving = pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended,
        () = shutdown => handle.graceful_shutdown(None),
    }
    serving.await
}
