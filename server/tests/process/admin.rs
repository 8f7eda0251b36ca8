//! `--admin-addr`: health, readiness and metrics on an address of their own.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::live::{Request, Server, get, spawn};
use serde_json::{Value, json};

const KEY: &str = "sk-0123456789abcdef";

/// Starts a server with an admin address, and returns both.
fn start(folder: &std::path::Path, flags: &[&str]) -> (Server, String) {
    let data = folder.join("data");
    let server = Server::start(&data, &[&["--admin-addr", "127.0.0.1:0"][..], flags].concat());
    let log = std::fs::read_to_string(data.with_extension("log")).unwrap();
    let admin = log.split_once("metrics at http://").unwrap().1.split_once(',').unwrap().0.to_owned();
    (server, admin)
}

fn status(address: &str, path: &str) -> u16 {
    get(address, path).unwrap().status
}

#[test]
fn health_and_metrics_have_an_address_of_their_own_without_keys() {
    let folder = tempfile::tempdir().unwrap();
    let (server, admin) = start(folder.path(), &["--api-key", KEY]);
    assert_eq!(["/livez", "/health", "/ready", "/metrics"].map(|path| status(&admin, path)), [200; 4]);
    let metrics = get(&admin, "/metrics").unwrap().text();
    assert!(metrics.contains("tidegate_http_requests_total{"), "{metrics}");
    for path in ["/", "/v1/models", "/slots", "/openapi.json"] {
        assert_eq!(status(&admin, path), 404, "{path}");
    }
    let text = Request::json("POST", "/v1/completions", &json!({"prompt": "x"})).send(&admin).unwrap();
    assert_eq!(text.status, 404);
    let mut socket = TcpStream::connect(&admin).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("host_not_allowed"), "{answer}");

    assert_eq!(["/livez", "/health", "/ready"].map(|path| status(&server.address, path)), [200; 3]);
    assert_eq!(status(&server.address, "/metrics"), 401);
    let moved = Request::json("GET", "/metrics", &Value::Null).header("authorization", &format!("Bearer {KEY}"));
    let moved = moved.send(&server.address).unwrap();
    assert_eq!(moved.status, 404);
    assert!(moved.text().contains("--admin-addr"), "{}", moved.text());
}

#[test]
fn the_admin_address_answers_when_the_api_has_no_connection_left() {
    let folder = tempfile::tempdir().unwrap();
    let (server, admin) = start(folder.path(), &["--max-connections", "2"]);
    let body = json!({"prompt": "x", "max_tokens": 1_000_000, "ignore_eos": true, "stream": true}).to_string();
    let streams: Vec<TcpStream> = (0..2)
        .map(|_| {
            let mut socket = TcpStream::connect(&server.address).unwrap();
            let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
            socket.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
            socket.read_exact(&mut [0; 64]).unwrap();
            socket
        })
        .collect();
    assert_eq!(["/livez", "/health", "/ready", "/metrics"].map(|path| status(&admin, path)), [200; 4]);
    // Idle connections to the admin address do not block it either.
    let _idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(&admin).unwrap()).collect();
    assert_eq!(status(&admin, "/health"), 200);
    drop(streams);
}

#[test]
fn an_address_that_cannot_be_used_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for address in ["nonsense", "203.0.113.1:1"] {
        let data = folder.path().join("data");
        let mut child = spawn(&data, &["--admin-addr", address]);
        assert!(!child.wait().unwrap().success());
        let log = std::fs::read_to_string(data.with_extension("log")).unwrap();
        assert!(log.contains(&format!("--admin-addr {address}: cannot listen there")), "{log}");
    }
}
