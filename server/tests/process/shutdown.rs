//! SIGTERM while turns run: turns that outlive their clients are committed when the drain time is over.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;

use serde_json::{Value, json};

use crate::live::Server;

const FLAGS: [&str; 6] = ["--device", "cpu", "--drain-seconds", "0", "--threads", "1"];

/// Starts an endless turn and reads the beginning of its stream.
fn start(server: &Server, session: &Value, policy: &str) -> TcpStream {
    let body = json!({"prompt": "Once", "session": session, "max_tokens": 1_000_000, "ignore_eos": true, "stream": true,
        "on_disconnect": policy});
    let body = body.to_string();
    let mut socket = TcpStream::connect(&server.address).unwrap();
    write!(
        socket,
        "POST /v1/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        server.address,
        body.len()
    )
    .unwrap();
    let mut some = [0; 1000];
    socket.read_exact(&mut some).unwrap();
    assert!(some.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&some));
    socket
}

#[test]
fn sigterm_commits_turns_that_outlive_their_clients() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("data");
    let mut server = Server::start(&folder, &FLAGS);
    let policies = ["rollback", "commit", "continue"];
    let sessions = policies.map(|_| server.json("POST", "/v1/sessions", &json!({}))["id"].clone());
    let streams: Vec<TcpStream> =
        policies.iter().zip(&sessions).map(|(policy, session)| start(&server, session, policy)).collect();
    let pid = server.process().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    for (policy, mut stream) in policies.iter().zip(streams) {
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert_eq!(rest.contains("data: [DONE]"), *policy != "rollback", "{policy}: {rest}");
    }
    server.wait();
    let server = Server::start(&folder, &FLAGS);
    for (policy, session) in policies.iter().zip(&sessions) {
        let turns = server.json("GET", &format!("/v1/sessions/{}/turns", session.as_str().unwrap()), &Value::Null);
        let kinds: Vec<&str> =
            turns["data"].as_array().unwrap().iter().map(|it| it["kind"].as_str().unwrap()).collect();
        let expected = if *policy == "rollback" { &["create"][..] } else { &["create", "interrupted"] };
        assert_eq!(kinds, expected, "{policy}");
    }
}
