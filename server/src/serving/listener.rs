//! Connections as they are taken: no more than there may be, each set up for small packets.

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

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(SocketAddr);

impl Address for Peer {
    type Stream = Connection;
    type Listener = Doorway;
}

/// Takes connections while there is room. Those that come then wait in the system's own queue: short answers are over
/// soon, and a burst loses nobody.
pub(super) struct Doorway {
    listener: TcpListener,
    room: Arc<Semaphore>,
    write_limit: Duration,
}

impl Doorway {
    pub(super) fn new(listener: TcpListener, most: usize, write_limit: Duration) -> Self {
        Self { listener, room: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))), write_limit }
    }
}

impl AddrListener<Connection, Peer> for Doorway {
    async fn bind_to(address: Peer) -> io::Result<Self> {
        let super::ServeOptions { max_connections, write_limit, .. } = super::ServeOptions::default();
        Ok(Self::new(TcpListener::bind(address.0).await?, max_connections, write_limit))
    }

    async fn accept_stream(&self) -> io::Result<(Connection, Peer)> {
        let place = Arc::clone(&self.room).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, peer) = self.listener.accept().await?;
        // A token is a small packet that must not wait for the next; without the option it is late, not wrong.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY on a connection");
        }
        let mut stream = TimeoutStream::new(stream);
        // Who reads nothing would else keep its place for ever.
        stream.set_write_timeout(Some(self.write_limit));
        Ok((Connection { stream: Box::pin(stream), _place: place }, Peer(peer)))
    }

    fn get_local_addr(&self) -> io::Result<Peer> {
        self.listener.local_addr().map(Peer)
    }
}

/// A connection and its place.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    _place: OwnedSemaphorePermit,
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
