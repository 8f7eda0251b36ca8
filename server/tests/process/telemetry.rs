//! Traces of the real server, as received by a collector.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::live::{Request, Server};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, any_value::Value as Any};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use prost::Message;
use serde_json::json;
use tidegate_server::session::hex;

/// Starts a collector that accepts everything. Returns what it receives, and its address.
fn collector() -> (Receiver<(String, ExportTraceServiceRequest)>, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let (mut socket, sender) = (socket.unwrap(), sender.clone());
            std::thread::spawn(move || {
                let mut raw = Vec::new();
                let mut piece = [0; 4096];
                while let Ok(count @ 1..) = socket.read(&mut piece) {
                    raw.extend_from_slice(&piece[..count]);
                    let Some(end) = raw.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
                    let head = String::from_utf8_lossy(&raw[..end]).to_ascii_lowercase();
                    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                    let whole = end + 4 + length.parse::<usize>().unwrap();
                    if raw.len() >= whole {
                        let body = ExportTraceServiceRequest::decode(&raw[end + 4..whole]).unwrap();
                        let _ = sender.send((head, body));
                        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                        raw.drain(..whole);
                    }
                }
            });
        }
    });
    (receiver, address)
}

fn text(value: &AnyValue) -> String {
    match value.value.as_ref() {
        Some(Any::StringValue(text)) => text.clone(),
        Some(Any::IntValue(number)) => number.to_string(),
        Some(Any::ArrayValue(array)) => array.values.iter().map(text).collect::<Vec<_>>().join(","),
        other => panic!("{other:?}"),
    }
}

fn attribute(span: &Span, name: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == name);
    found.and_then(|attribute| attribute.value.as_ref()).map_or_else(String::new, text)
}

#[test]
fn a_request_is_a_span_in_the_callers_trace_with_its_phases_as_children() {
    let (batches, address) = collector();
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&folder.path().join("data"), &["--otlp-endpoint", &address]);
    let (trace, caller) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let body = json!({"prompt": "The sea", "max_tokens": 5, "ignore_eos": true, "stream": true,
        "stream_options": {"include_usage": true}});
    let request = Request::json("POST", "/v1/completions", &body).header("x-request-id", "one");
    let reply = request.header("traceparent", &format!("00-{trace}-{caller}-01")).send(&server.address).unwrap();
    assert_eq!(reply.status, 200);
    let usage = reply.chunks().last().unwrap()["usage"].clone();
    // Remaining spans are sent at shutdown.
    Command::new("kill").args(["-TERM", &server.process().to_string()]).status().unwrap();
    server.wait();

    let mut spans = Vec::new();
    while let Ok((head, batch)) = batches.recv_timeout(Duration::from_secs(1)) {
        assert!(
            head.starts_with("post /v1/traces ") && head.contains("content-type: application/x-protobuf"),
            "{head}"
        );
        for batch in batch.resource_spans {
            let named = batch.resource.unwrap().attributes.into_iter();
            let named: Vec<String> = named.map(|of| format!("{}={}", of.key, text(&of.value.unwrap()))).collect();
            assert!(named.contains(&"service.name=tidegate".to_owned()), "{named:?}");
            spans.extend(batch.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
    }
    let root = spans.iter().find(|span| span.name == "POST /v1/completions").expect("no span of the request");
    assert_eq!((hex(&root.trace_id), hex(&root.parent_span_id)), (trace.into(), caller.into()));
    assert_eq!(root.kind, SpanKind::Server as i32);
    for (name, value) in [
        ("http.route", "/v1/completions"),
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("tidegate.request_id", "one"),
        ("gen_ai.operation.name", "text_completion"),
        ("gen_ai.usage.input_tokens", &usage["prompt_tokens"].to_string()),
        ("gen_ai.usage.output_tokens", "5"),
    ] {
        assert_eq!(attribute(root, name), value, "{name}");
    }
    let mut at = root.start_time_unix_nano;
    for name in ["queue", "prefill", "decode"] {
        let phase = spans.iter().find(|span| span.name == name && span.parent_span_id == root.span_id);
        let phase = phase.unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(phase.trace_id, root.trace_id);
        assert!(phase.start_time_unix_nano >= at && phase.end_time_unix_nano <= root.end_time_unix_nano, "{name}");
        at = phase.start_time_unix_nano;
    }
    let decode = spans.iter().find(|span| span.name == "decode").unwrap();
    assert_eq!(attribute(decode, "gen_ai.response.finish_reasons"), "length");
    // A request without a trace starts one.
    let ready = spans.iter().find(|span| span.name == "GET /ready").expect("no span of /ready");
    assert!(ready.parent_span_id.is_empty() && ready.trace_id != root.trace_id);
    assert!(!spans.iter().any(|span| format!("{span:?}").contains("The sea")), "a span contains a client's text");
}

#[test]
fn an_unresponsive_collector_delays_no_request() {
    // Bound, but never accepting: the worst case.
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", dead.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&folder.path().join("data"), &["--otlp-endpoint", &address]);
    for _ in 0..3 {
        let body = json!({"prompt": "The sea", "max_tokens": 3});
        let reply = Request::json("POST", "/v1/completions", &body).send(&server.address).unwrap();
        assert!(reply.status == 200 && reply.whole < Duration::from_secs(30));
    }
    let began = Instant::now();
    Command::new("kill").args(["-TERM", &server.process().to_string()]).status().unwrap();
    server.wait();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let log = std::fs::read_to_string(folder.path().join("data.log")).unwrap();
    let warnings = log.lines().filter(|line| line.contains("WARN") && line.contains("spans")).count();
    assert!(warnings <= 1, "{log}");
}

#[test]
fn tls_to_the_collector_is_refused_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let mut child = crate::live::spawn(&data, &["--otlp-endpoint", "https://127.0.0.1:4318"]);
    assert!(!child.wait().unwrap().success());
    let log = std::fs::read_to_string(data.with_extension("log")).unwrap();
    assert!(log.contains("without TLS") && log.contains("--otlp-endpoint"), "{log}");
}
