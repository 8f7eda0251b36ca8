//! The serving loop: accepts connections, enforces their timeouts, and shuts down gracefully.
//!
//! Only HTTP/1.1 is supported: a server of streams gains nothing from several streams per connection, and a slow reader
//! must not delay others.

use std::future::Future;
use std::io;
use std::pin::pin;

use axum::Router;
use axum::middleware::from_fn;
use axum_server::tls_rustls::RustlsAcceptor;
use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use tokio::net::TcpListener;

use super::listener::{LimitedListener, Peer};
use super::options::ServeOptions;
use super::requests::{Client, keep_open};

/// Size of the buffer for the head of a request; hyper answers a larger head with status 431. The API's own limit is
/// half of this, because hyper's is not exact.
const HEAD_BUFFER_BYTES: usize = 64 << 10;

/// Serves `app` with default options until `shutdown` completes, and then finishes running requests.
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

/// Like [`serve`], but with options.
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
    let listener = LimitedListener::new(listener, &options);
    let mut server = Server::<Peer>::from_listener(listener).handle(handle.clone());
    let mut http = server.http_builder().http1();
    http.timer(TokioTimer::new()).header_read_timeout(options.header_timeout).max_buf_size(HEAD_BUFFER_BYTES);
    let app = app.layer(from_fn(keep_open)).into_make_service_with_connect_info::<Client>();
    match options.tls {
        None => serve_until(server.http1_only().serve(app), handle, shutdown).await,
        Some(tls) => {
            let acceptor = RustlsAcceptor::new(tls.config()).handshake_timeout(options.handshake_timeout);
            serve_until(server.acceptor(acceptor).http1_only().serve(app), handle, shutdown).await
        }
    }
}

/// Serves until `shutdown` completes, and then until all connections are closed.
async fn serve_until(
    serving: impl Future<Output = io::Result<()>>,
    handle: Handle<Peer>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let mut serving = pin!(serving);
    tokio::select! {
        result = &mut serving => return result,
        () = shutdown => handle.graceful_shutdown(None),
    }
    serving.await
}
