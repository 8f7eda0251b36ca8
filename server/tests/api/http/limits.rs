//! Limits on the server's time and memory that clients can take: request heads, bodies, connections, endless texts and
//! deeply nested JSON. Other clients are not delayed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::fake::Fake;
use crate::common::{completion, post, scripted, send, text};
use axum::body::Body;
use axum::http::{Request, StatusCode};
use serde_json::{Value, json};
use tidegate_server::{ApiOptions, AppState, ServeOptions, app, serve_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(20);

/// Starts a server on a free port; it stops when the sender is dropped.
async fn listen(options: ServeOptions, state: AppState) -> (SocketAddr, oneshot::Sender<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    tokio::spawn(serve_with(options, listener, app(state), async { _ = stopped.await }));
    (address, stop)
}

fn api(options: ApiOptions, step: Duration) -> AppState {
    let (_, engine, _thread) = scripted(Fake::new(4).step(step), 16);
    let state = AppState::new(options);
    state.serve(crate::common::served(engine));
    state
}

/// Reads until the peer closes the connection.
async fn rest(socket: &mut TcpStream) -> String {
    let mut all = Vec::new();
    // A reset also closes the connection.
    let _ = timeout(SOON, socket.read_to_end(&mut all)).await.expect("the connection stays open");
    String::from_utf8_lossy(&all).into_owned()
}

async fn ask(address: SocketAddr, request: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    socket
}

async fn is_well(address: SocketAddr) {
    let start = Instant::now();
    let mut socket = ask(address, "GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").await;
    let answer = rest(&mut socket).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(start.elapsed() < Duration::from_secs(15), "it took {:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_head_times_out() {
    let options = ServeOptions { header_timeout: Duration::from_millis(500), ..ServeOptions::default() };
    let (address, _stop) = listen(options, AppState::new(ApiOptions::default())).await;
    let mut slow = Vec::new();
    for _ in 0..50 {
        slow.push(ask(address, "GET /livez HTTP/1.1\r\nhost: t\r\nx-slow: ").await);
    }
    let mut silent = TcpStream::connect(address).await.unwrap();
    let start = Instant::now();
    is_well(address).await;
    // Each byte arrives in time, but the whole head does not.
    while start.elapsed() < Duration::from_millis(400) {
        for socket in &mut slow {
            // On a busy machine some may have timed out by now.
            let _ = socket.write_all(b"x").await;
        }
        sleep(Duration::from_millis(20)).await;
    }
    for socket in &mut slow {
        assert!(!rest(socket).await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(rest(&mut silent).await, "");
    assert!(start.elapsed() < Duration::from_secs(5), "it took {:?}", start.elapsed());
    is_well(address).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_head_is_refused() {
    let (address, _stop) = listen(ServeOptions::default(), AppState::new(ApiOptions::default())).await;
    let long = format!("GET /livez HTTP/1.1\r\nhost: t\r\nx-long: {}\r\n\r\n", "x".repeat(64 << 10));
    let many = "x-many: 1\r\n".repeat(500);
    for head in [
        long,
        format!("GET /livez HTTP/1.1\r\nhost: t\r\n{many}\r\n"),
        format!("GET /{} HTTP/1.1\r\n", "x".repeat(80 << 10)),
    ] {
        let mut socket = TcpStream::connect(address).await.unwrap();
        // The server may close before it has read everything.
        let _ = socket.write_all(head.as_bytes()).await;
        let answer = rest(&mut socket).await;
        // If it closes with unread bytes, the answer may be lost.
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
        is_well(address).await;
    }
    let mut socket = ask(address, "no HTTP at all\r\n\r\n").await;
    assert!(rest(&mut socket).await.starts_with("HTTP/1.1 400"));
    let large =
        format!("GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-long: {}\r\n\r\n", "x".repeat(20 << 10));
    assert!(rest(&mut ask(address, &large).await).await.starts_with("HTTP/1.1 200"), "20 KiB are taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_may_have_32_kib_to_the_byte() {
    let (address, _stop) = listen(ServeOptions::default(), AppState::new(ApiOptions::default())).await;
    let head = |total: usize| {
        let start = "GET /livez?x HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx-long: ";
        format!("{start}{}\r\n\r\n", "x".repeat(total - start.len() - 4))
    };
    for (bytes, status) in [(32 << 10, 200), ((32 << 10) + 1, 431), (50_000, 431)] {
        let answer = rest(&mut ask(address, &head(bytes)).await).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{bytes}: {answer}");
        assert!(status == 200 || answer.contains("headers_too_large"), "{bytes}: {answer}");
        // The same head in two pieces, the second of which ends it.
        let whole = head(bytes);
        let (first, second) = whole.split_at(bytes - 1);
        let mut socket = ask(address, first).await;
        sleep(Duration::from_millis(20)).await;
        socket.write_all(second.as_bytes()).await.unwrap();
        assert!(rest(&mut socket).await.starts_with(&format!("HTTP/1.1 {status}")), "{bytes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_is_disconnected() {
    let write_timeout = Duration::from_millis(300);
    let options = ServeOptions { max_connections: 1, write_timeout, ..ServeOptions::default() };
    let (address, _stop) = listen(options, AppState::new(ApiOptions::default())).await;
    // Requests far more bytes than the buffers on the way hold, and reads nothing.
    let mut deaf = TcpStream::connect(address).await.unwrap();
    let asked = "GET /playground/style.css HTTP/1.1\r\nhost: t\r\n\r\n".repeat(2000);
    let _ = timeout(SOON, deaf.write_all(asked.as_bytes())).await;
    is_well(address).await;
    drop(deaf);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_trickles_in_is_408() {
    let limits = ApiOptions { body_limit: Duration::from_millis(300), ..ApiOptions::default() };
    let (address, _stop) = listen(ServeOptions::default(), api(limits, Duration::ZERO)).await;
    let json = "content-type: application/json\r\n";
    for (path, kind, body) in [
        ("/v1/completions", json, "content-length: 100\r\n\r\n{\"prompt\""),
        ("/v1/chat/completions", json, "transfer-encoding: chunked\r\n\r\n5\r\n{\"mes\r\n"),
        ("/v1/responses", json, "content-length: 9\r\n\r\n"),
    ] {
        let start = Instant::now();
        let mut socket = ask(address, &format!("POST {path} HTTP/1.1\r\nhost: t\r\n{kind}{body}")).await;
        is_well(address).await;
        let answer = rest(&mut socket).await;
        assert!(answer.starts_with("HTTP/1.1 408"), "{path}: {answer}");
        assert!(answer.contains("x-request-id: req-") && answer.contains("body_timeout"), "{answer}");
        assert!(answer.contains("within 0.3 s"), "{answer}");
        assert!(start.elapsed() >= Duration::from_millis(300));
    }
    let whole = r#"{"prompt": [1], "max_tokens": 1}"#;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{json}content-length: {}\r\n\r\n",
        whole.len()
    );
    assert!(rest(&mut ask(address, &(head + whole)).await).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_ends_at_its_time_limit() {
    let limits = ApiOptions { max_time: Some(Duration::from_secs(1)), ..ApiOptions::default() };
    let state = api(limits, Duration::from_millis(5));
    let body = json!({"prompt": [1], "max_tokens": 100_000, "ignore_eos": true});
    let start = Instant::now();
    let (status, answer) = timeout(SOON, post(&state, body.clone())).await.expect("the text ends in time");
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((2..99_000).contains(&tokens), "{tokens}");
    let stream = send(&state, completion(crate::common::with(body, json!({"stream": true})).to_string())).await;
    let stream = timeout(SOON, text(stream)).await.expect("the text ends in time");
    assert!(stream.contains(r#""finish_reason":"length""#) && stream.trim_end().ends_with("[DONE]"));
    let (_, short) = post(&state, json!({"prompt": [1], "max_tokens": 3, "ignore_eos": true})).await;
    assert_eq!(short["usage"]["completion_tokens"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_text_waiting_for_a_slot_ends_at_its_time_limit() {
    // A request's first step ends before the time limit, and the second one long after it. The second request may
    // arrive up to a second after the first one.
    let (_, engine, _thread) = scripted(Fake::new(1).step(Duration::from_millis(1500)), 16);
    let state = AppState::new(ApiOptions { max_time: Some(Duration::from_secs(2)), ..ApiOptions::default() });
    state.serve(crate::common::served(engine.clone()));
    // This request occupies the only slot while the model reads its prompt token by token.
    let (first, body) = (state.clone(), json!({"prompt": vec![1; 20], "echo": true, "logprobs": 0, "max_tokens": 3}));
    let running = tokio::spawn(async move { post(&first, body).await });
    while engine.stats().running == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let request = Request::post("/completion").header("content-type", "application/json");
    let asked = json!({"prompt": "", "n_predict": 5, "stream": true});
    let stream = text(send(&state, request.body(Body::from(asked.to_string())).unwrap()).await).await;
    let last: Value = serde_json::from_str(crate::common::events(&stream).last().unwrap()).unwrap();
    assert_eq!((&last["tokens_predicted"], &last["stop_type"]), (&json!(0), &json!("limit")));
    let (status, answer) = timeout(SOON, running).await.expect("the text ends in time").unwrap();
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (StatusCode::OK, &json!(0)), "{answer}");
}

#[tokio::test]
async fn deeply_nested_json_is_refused_with_the_limit() {
    let state = api(ApiOptions::default(), Duration::ZERO);
    let nested = |open: &str, close: &str, levels: usize| format!("{}1{}", open.repeat(levels), close.repeat(levels));
    for levels in [128, 1000, 100_000] {
        for value in [nested("[", "]", levels), nested(r#"{"a":"#, "}", levels)] {
            for field in ["prompt", "metadata", "user"] {
                let body = format!(r#"{{"{field}": {value}, "max_tokens": 1}}"#);
                let response = send(&state, completion(body)).await;
                assert_eq!(response.status(), StatusCode::BAD_REQUEST);
                let answer: Value = serde_json::from_str(&text(response).await).unwrap();
                let message = answer["error"]["message"].as_str().unwrap();
                assert!(message.contains("at most 127 levels"), "{field} {levels}: {message}");
            }
        }
    }
    // Wide JSON is accepted.
    let wide: serde_json::Map<String, Value> = (0..20_000).map(|at| (format!("field{at}"), json!([1]))).collect();
    let body = json!({"prompt": [1], "max_tokens": 1, "metadata": wide});
    assert_eq!(post(&state, body).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_body_without_bounds_is_413_with_its_bound() {
    let state = api(ApiOptions { max_body_bytes: 1000, ..ApiOptions::default() }, Duration::ZERO);
    let response = send(&state, completion(format!(r#"{{"prompt": "{}"}}"#, "x".repeat(1000)))).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert!(response.headers().contains_key("x-request-id"));
    assert!(text(response).await.contains("at most 1000 bytes"));
    let nothing = Request::post("/v1/completions").body(Body::empty()).unwrap();
    assert_eq!(send(&state, nothing).await.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
}
