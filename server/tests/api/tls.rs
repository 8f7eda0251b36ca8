//! TLS: reloading a certificate, and slow handshakes that do not delay other clients.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::fake::Fake;
use crate::common::{events, scripted};
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tidegate_server::{AppState, ServeOptions, Tls, app, serve_with};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_blocking};

type Certificate = CertifiedKey<KeyPair>;

fn certificate(folder: &Path) -> Certificate {
    let made = generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
    std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
    made
}

/// Handshake timeout, much longer than a real handshake takes on a busy machine.
const HANDSHAKE: Duration = Duration::from_secs(3);

fn load(folder: &Path) -> Tls {
    Tls::load(&folder.join("cert.pem"), &folder.join("key.pem")).unwrap()
}

async fn listen(tls: Tls, state: AppState) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let options = ServeOptions { tls: Some(tls), handshake_timeout: HANDSHAKE, ..ServeOptions::default() };
    let server = tokio::spawn(async move {
        serve_with(options, listener, app(state), async { _ = stopped.await }).await.unwrap();
    });
    (address, stop, server)
}

/// Sends `request` over TLS, trusting only `certificate`, and reads the answer to its end.
fn ask(address: SocketAddr, certificate: &CertificateDer<'static>, request: &str) -> Result<String, std::io::Error> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate.clone()).unwrap();
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    let socket = TcpStream::connect(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut stream = StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), socket);
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        // Some peers close without a `close_notify` alert.
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {}
        read => _ = read?,
    }
    assert_eq!(stream.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn health(address: SocketAddr, certificate: &Certificate) -> Result<String, std::io::Error> {
    let certificate = certificate.cert.der().clone();
    spawn_blocking(move || ask(address, &certificate, "GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"))
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_handshake_delays_nobody_and_times_out() {
    let folder = tempfile::tempdir().unwrap();
    let made = certificate(folder.path());
    let (state, _, _thread) = scripted(Fake::new(2), 4);
    let (address, _stop, _server) = listen(load(folder.path()), state).await;
    let start = Instant::now();
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    let answer = health(address, &made).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#"{"status":"ok"}"#), "{answer}");
    assert!(start.elapsed() < HANDSHAKE, "it waited for the silent ones: {:?}", start.elapsed());
    for mut socket in silent {
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let closed = spawn_blocking(move || socket.read(&mut [0; 64])).await.unwrap();
        assert!(
            matches!(closed, Ok(0)) || closed.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
        );
    }
    assert!(start.elapsed() < Duration::from_secs(20), "they were waited for: {:?}", start.elapsed());
    // A plain-text client gets no answer.
    let mut plain = TcpStream::connect(address).unwrap();
    plain.write_all(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!String::from_utf8_lossy(&answer).contains("200 OK"));
    assert!(health(address, &made).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_over_tls_is_finished_when_the_server_stops() {
    let folder = tempfile::tempdir().unwrap();
    let made = certificate(folder.path());
    let (state, engine, _thread) = scripted(Fake::new(2).step(Duration::from_millis(20)), 4);
    let (address, stop, server) = listen(load(folder.path()), state).await;
    let certificate = made.cert.der().clone();
    let body = r#"{"prompt": [1], "max_tokens": 100, "ignore_eos": true, "stream": true}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let client = spawn_blocking(move || ask(address, &certificate, &request).unwrap());
    let start = Instant::now();
    while engine.stats().running == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "the request never started");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    stop.send(()).unwrap();
    let answer = client.await.unwrap();
    let data: Vec<&str> = answer.lines().filter(|line| line.starts_with("data: ")).collect();
    assert_eq!(events(&data.join("\n")).last(), Some(&"[DONE]"), "{answer}");
    tokio::time::timeout(Duration::from_secs(20), server).await.expect("the server does not end").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_reloaded_and_an_invalid_one_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let old = certificate(folder.path());
    let tls = load(folder.path());
    let (state, _, _thread) = scripted(Fake::new(2), 4);
    let (address, _stop, _server) = listen(tls.clone(), state).await;
    assert!(health(address, &old).await.is_ok());
    let new = certificate(folder.path());
    assert!(health(address, &new).await.is_err(), "the new certificate is not loaded yet");
    tls.reload().unwrap();
    assert!(health(address, &new).await.is_ok());
    assert!(health(address, &old).await.is_err());
    let path = |name: &str| folder.path().join(name);
    for (name, bad, words) in [
        ("key.pem", old.signing_key.serialize_pem(), "cannot be used with this key"),
        ("cert.pem", "no certificate".to_owned(), "certificate"),
        ("key.pem", String::new(), "private key"),
    ] {
        let good = std::fs::read(path(name)).unwrap();
        std::fs::write(path(name), bad).unwrap();
        let error = tls.reload().unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(health(address, &new).await.is_ok(), "after {name} became invalid");
        std::fs::write(path(name), good).unwrap();
    }
    assert!(Tls::load(&path("missing.pem"), &path("key.pem")).unwrap_err().to_string().contains("missing.pem"));
}
