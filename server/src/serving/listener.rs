//! Accepts connections within the limits, and sets them up for small packets.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum_server::{AddrListener, Address};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_io_timeout::TimeoutStream;

use super::connections::{Connections, Entry, Limits};
use super::options::ServeOptions;

/// The client of a connection, and the entry that counts the connection.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) entry: Option<Arc<Entry>>,
}

impl Address for Peer {
    type Stream = Connection;
    type Listener = LimitedListener;
}

/// Accepts connections within the limits. While every open connection has a running request, new ones wait in the
/// system's queue, so that a short burst loses no connection.
pub(super) struct LimitedListener {
    listener: TcpListener,
    connections: Arc<Connections>,
    write_timeout: Duration,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener, options: &ServeOptions) -> Self {
        let limits = Limits { total: options.max_connections, per_peer: options.max_connections_per_peer };
        let connections = Arc::new(Connections::new(limits));
        Self { listener, connections, write_timeout: options.write_timeout }
    }
}

impl AddrListener<Connection, Peer> for LimitedListener {
    async fn bind_to(address: Peer) -> io::Result<Self> {
        Ok(Self::new(TcpListener::bind(address.address).await?, &ServeOptions::default()))
    }

    async fn accept_stream(&self) -> io::Result<(Connection, Peer)> {
        let (stream, address, entry) = loop {
            let (stream, address) = self.listener.accept().await?;
            if let Some(entry) = self.connections.admit(address.ip()).await {
                break (stream, address, entry);
            }
        };
        // This uncounts the connection, however the function ends.
        let counted = Counted(Arc::clone(&entry));
        // Tokens are small packets that must not be delayed. If the option cannot be set, they are late but correct.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "setting TCP_NODELAY on a connection failed");
        }
        let mut stream = TimeoutStream::new(stream);
        // Without this timeout, a client that reads nothing would hold its connection forever.
        stream.set_write_timeout(Some(self.write_timeout));
        Ok((Connection { stream: Box::pin(stream), counted }, Peer { address, entry: Some(entry) }))
    }

    fn get_local_addr(&self) -> io::Result<Peer> {
        self.listener.local_addr().map(|address| Peer { address, entry: None })
    }
}

/// A connection, counted until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    counted: Counted,
}

/// Counts a connection until it is dropped.
#[derive(Debug)]
struct Counted(Arc<Entry>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.closed();
    }
}

impl Connection {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TimeoutStream<TcpStream>> {
        self.get_mut().stream.as_mut()
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.counted.0.poll_closing(cx) {
            // As if the client had closed it; HTTP and TLS then end the connection in their own ways.
            return Poll::Ready(Ok(()));
        }
        self.stream().poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = self.as_mut().stream().poll_write(cx, bytes);
        self.counted.0.wrote(cx, &result);
        result
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.as_mut().stream().poll_write_vectored(cx, parts);
        self.counted.0.wrote(cx, &result);
        result
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
