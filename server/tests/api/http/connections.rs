//! Limits on connections: a new connection replaces an idle one, and running requests are kept.

use std::net::SocketAddr;
use std::time::Duration;

use crate::common::fake::Fake;
use crate::common::scripted;
use tidegate_server::engine::{EngineHandle, EngineThread};
use tidegate_server::{ServeOptions, app, serve_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const HEALTH: &str = "GET /livez HTTP/1.1\r\nhost: t\r\n\r\n";

struct Server {
    address: SocketAddr,
    engine: EngineHandle,
    /// Stops the server when it is dropped at the end of the test.
    _keep: (EngineThread, oneshot::Sender<()>),
}

/// Starts a server that closes connections only because of a limit on their number.
async fn listen(max_connections: usize, max_connections_per_peer: Option<usize>) -> Server {
    let day = Duration::from_hours(24);
    let options = ServeOptions {
        max_connections,
        max_connections_per_peer,
        header_timeout: day,
        write_timeout: day,
        ..ServeOptions::default()
    };
    let (state, engine, thread) = scripted(Fake::new(8).step(Duration::from_millis(2)), 16);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(serve_with(options, listener, app(state), async { _ = stopped.await }));
    Server { address, engine, _keep: (thread, stop) }
}

impl Server {
    async fn send(&self, request: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        socket
    }

    /// Returns a connection that has received an answer and may send another request.
    async fn kept_alive(&self) -> TcpStream {
        let mut socket = self.send(HEALTH).await;
        read_until(&mut socket, r#"{"status":"ok"}"#).await;
        socket
    }

    async fn endless_stream(&self) -> TcpStream {
        let body = r#"{"prompt": [1], "max_tokens": 100000, "ignore_eos": true, "stream": true}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length";
        let mut socket = self.send(&format!("{head}: {}\r\n\r\n{body}", body.len())).await;
        read_until(&mut socket, "data: ").await;
        socket
    }

    async fn is_well(&self) {
        read_until(&mut self.send(HEALTH).await, r#"{"status":"ok"}"#).await;
    }
}

/// Reads until `end` arrives.
async fn read_until(socket: &mut TcpStream, end: &str) {
    let (mut all, mut piece) = (String::new(), [0; 4096]);
    while !all.contains(end) {
        let count = socket.read(&mut piece).await.unwrap();
        assert_ne!(count, 0, "the connection was closed before {end:?}: {all}");
        all.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
}

/// Waits until the server closes the connection, and returns what it sent before.
async fn rest(mut socket: TcpStream) -> String {
    let mut all = Vec::new();
    // A reset also closes the connection.
    let _ = socket.read_to_end(&mut all).await;
    String::from_utf8_lossy(&all).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_make_place_in_the_order_of_their_idle_times() {
    let server = listen(4, None).await;
    let silent = server.send("").await;
    let slow = server.send("GET /livez HTTP/1.1\r\nx-slow: ").await;
    let mut first = server.kept_alive().await;
    let second = server.kept_alive().await;
    // The first connection is now the last one used.
    first.write_all(HEALTH.as_bytes()).await.unwrap();
    read_until(&mut first, r#"{"status":"ok"}"#).await;
    let mut kept = Vec::new();
    for closed in [silent, slow, second] {
        kept.push(server.kept_alive().await);
        assert!(!rest(closed).await.contains("200"));
    }
    first.write_all(HEALTH.as_bytes()).await.unwrap();
    read_until(&mut first, r#"{"status":"ok"}"#).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_idle_connections_than_the_limit_keep_nobody_waiting() {
    let server = listen(64, None).await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(server.send("").await);
    }
    server.is_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_are_not_dropped_and_new_connections_wait_for_them() {
    let server = listen(2, None).await;
    let (mut one, two) = (server.endless_stream().await, server.endless_stream().await);
    let mut third = server.send(HEALTH).await;
    for _ in 0..20 {
        read_until(&mut one, "data: ").await;
    }
    let early = third.try_read(&mut [0; 64]);
    assert!(early.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "there are three connections");
    assert_eq!(server.engine.stats().running, 2);
    drop(two);
    read_until(&mut third, r#"{"status":"ok"}"#).await;
    // The third connection is idle now and makes room.
    server.is_well().await;
    read_until(&mut one, "data: ").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_client_has_its_own_limit() {
    let server = listen(64, Some(2)).await;
    let (oldest, mut running) = (server.kept_alive().await, server.endless_stream().await);
    server.is_well().await;
    assert_eq!(rest(oldest).await, "");
    let other = server.endless_stream().await;
    // The client's next connection is closed at once: waiting would hold up the connections of others.
    assert_eq!(rest(server.send("").await).await, "");
    drop(other);
    while server.engine.stats().running > 1 {
        read_until(&mut running, "data: ").await;
    }
    // The server may notice the closed connection a moment after the engine does.
    let mut answered = false;
    while !answered {
        read_until(&mut running, "data: ").await;
        answered =
            rest(server.send("GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").await).await.contains("ok");
    }
}
