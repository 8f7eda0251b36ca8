//! Tells the application which client sent a request, and marks the connection as busy from the head of the request to
//! the end of its answer.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};

use super::connections::Running;
use super::listener::Peer;

/// The client of a request's connection.
#[derive(Clone, Debug)]
pub(super) struct Client(Peer);

impl Connected<Peer> for Client {
    fn connect_info(peer: Peer) -> Self {
        Self(peer)
    }
}

/// Keeps the connection of a request open until the answer has ended. Adds the client's address to the request, as
/// `ConnectInfo<SocketAddr>`.
pub(super) async fn keep_open(client: ConnectInfo<Client>, mut request: Request, next: Next) -> Response {
    let ConnectInfo(Client(Peer { address, entry })) = client;
    // On a listener for both IPv4 and IPv6, show an IPv4 client with its IPv4 address.
    let address = SocketAddr::new(address.ip().to_canonical(), address.port());
    request.extensions_mut().insert(ConnectInfo(address));
    let Some(running) = entry.map(|entry| entry.run()) else { return next.run(request).await };
    next.run(request).await.map(|body| Body::new(RunningBody { body, _running: running }))
}

/// The body of an answer. The request counts as running until this is dropped.
struct RunningBody {
    body: Body,
    _running: Running,
}

impl HttpBody for RunningBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
