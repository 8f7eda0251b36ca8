//! Accepts connections, up to a limit, and sets them up for small packets.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::{AddrListener, Address};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_io_timeout::TimeoutStream;

use super::options::ServeOptions;

/// The address of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(SocketAddr);

impl Address for Peer {
    type Stream = Connection;
    type Listener = LimitedListener;
}

/// Accepts connections while fewer than the limit are open. Others wait in the system's queue, so that a short burst loses
/// no connection.
pub(super) struct LimitedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    write_timeout: Duration,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener, max: usize, write_timeout: Duration) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(max.min(Semaphore::MAX_PERMITS))), write_timeout }
    }
}

impl AddrListener<Connection, Peer> for LimitedListener {
    async fn bind_to(address: Peer) -> io::Result<Self> {
        let ServeOptions { max_connections, write_timeout, .. } = ServeOptions::default();
        Ok(Self::new(TcpListener::bind(address.0).await?, max_connections, write_timeout))
    }

    async fn accept_stream(&self) -> io::Result<(Connection, Peer)> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, peer) = self.listener.accept().await?;
        // Tokens are small packets that must not be delayed. Without the option they are late, but correct.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "setting TCP_NODELAY on a connection failed");
        }
        let mut stream = TimeoutStream::new(stream);
        // Otherwise a client that reads nothing would hold its connection for ever.
        stream.set_write_timeout(Some(self.write_timeout));
        Ok((Connection { stream: Box::pin(stream), _permit: permit }, Peer(peer)))
    }

    fn get_local_addr(&self) -> io::Result<Peer> {
        self.listener.local_addr().map(Peer)
    }
}

/// A connection, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TimeoutStream<TcpStream>> {
        self.get_mut().stream.as_mut()
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.stream().poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}
