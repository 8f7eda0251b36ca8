//! The log as JSON: the client and key behind each line, and the events of sessions.

use std::fs;

use serde_json::{Value, json};

use crate::live::{Request, Server};

const KEY: &str = "sk-0123456789abcdef";

/// Starts a server whose log is JSON, with further `flags`.
fn start(folder: &std::path::Path, flags: &[&str]) -> Server {
    let common = ["--device", "cpu", "--threads", "1", "--log-format", "json"];
    Server::start(&folder.join("data"), &[&common[..], flags].concat())
}

/// Returns the complete lines of the log.
fn lines(folder: &std::path::Path) -> Vec<Value> {
    let log = fs::read_to_string(folder.join("data.log")).unwrap();
    let (whole, _) = log.rsplit_once('\n').unwrap();
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}"))).collect()
}

#[test]
fn every_change_of_a_session_is_a_line_with_its_client_and_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.json");
    fs::write(&keys, json!({"keys": [{"name": "ann", "key": KEY}]}).to_string()).unwrap();
    let server = start(folder.path(), &["--api-keys-file", keys.to_str().unwrap()]);
    let send = |request: Request| {
        let reply = request.header("authorization", &format!("Bearer {KEY}")).send(&server.address).unwrap();
        assert!(reply.status < 300, "{}", reply.text());
        reply
    };
    let post = |path: &str, body: &Value| send(Request::json("POST", path, body)).json();
    let id = |session: &Value| session["id"].as_str().unwrap().to_owned();

    let session = id(&post("/v1/sessions", &json!({"text": "Once"})));
    let forks = post(&format!("/v1/sessions/{session}/fork"), &json!({"n": 2}));
    let [one, two] = [0, 1].map(|at| id(&forks["data"][at]));
    let turn = json!({"session": session, "prompt": " upon", "max_tokens": 2, "n": 2, "keep": "all"});
    let turn = post("/v1/completions", &turn);
    let beside = id(&turn["session"]["forks"][0]);
    let snapshot = send(Request::json("GET", &format!("/v1/sessions/{session}/snapshot"), &Value::Null)).body;
    let upload =
        Request::json("POST", "/v1/snapshots", &Value::Null).header("content-type", "application/octet-stream");
    let uploaded = id(&send(upload.body(snapshot)).json());
    send(Request::json("DELETE", &format!("/v1/sessions/{one}"), &Value::Null));

    let log = lines(folder.path());
    let is_event = |line: &&Value| line["message"].as_str().is_some_and(|message| message.starts_with("session "));
    let events: Vec<&Value> = log.iter().filter(is_event).collect();
    let told: Vec<(&str, &str, &Value)> = events
        .iter()
        .map(|line| (line["message"].as_str().unwrap(), line["session"].as_str().unwrap(), &line["from"]))
        .collect();
    let (none, from) = (Value::Null, Value::from(&*session));
    let expected = [
        ("session created", &*session, &none),
        ("session forked", &one, &from),
        ("session forked", &two, &from),
        ("session forked", &beside, &from),
        ("session downloaded", &session, &none),
        ("session uploaded", &uploaded, &none),
        ("session deleted", &one, &none),
    ];
    assert_eq!(told, expected);
    for line in &events {
        let span = &line["span"];
        assert_eq!((&line["level"], &span["key"]), (&"INFO".into(), &"ann".into()), "{line}");
        let client = span["client"].as_str().unwrap_or_default();
        assert!(client.strip_prefix("127.0.0.1:").is_some_and(|port| port.parse::<u16>().is_ok()), "{line}");
        assert!(span["id"].as_str().unwrap().starts_with("req-"), "{line}");
    }
    let finished = log.iter().find(|line| line["message"] == "completion finished").unwrap();
    assert!(finished["total_ms"].is_f64() && finished["span"]["completion_tokens"].is_u64(), "{finished}");
    assert!(!fs::read_to_string(folder.path().join("data.log")).unwrap().contains(KEY));
}

#[test]
fn the_address_in_the_log_is_that_of_the_connection() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(folder.path(), &[]);
    let request = Request::json("GET", "/v1/sessions/none", &Value::Null);
    let forged = request.header("x-forwarded-for", "203.0.113.7").header("forwarded", "for=203.0.113.7");
    assert_eq!(forged.send(&server.address).unwrap().status, 404);
    let log = lines(folder.path());
    let refused = log.iter().find(|line| line["status"] == 404).unwrap();
    assert!(refused["span"]["client"].as_str().unwrap().starts_with("127.0.0.1:"), "{refused}");
    assert!(!log.iter().any(|line| line.to_string().contains("203.0.113")), "{log:?}");
}
