//! Serving: queues, disconnects, panics, draining, readiness, request ids, and real sockets.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::common::fake::{Fake, POISON};
use crate::common::{completion, events, get, post, scripted, send, shipped, text};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::{ApiOptions, AppState, app, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

async fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn endless() -> Request<Body> {
    completion(json!({"prompt": [1], "max_tokens": 100_000, "ignore_eos": true, "stream": true}).to_string())
}

#[tokio::test]
async fn a_full_queue_is_429_with_a_time_to_come_back() {
    let (state, engine, _thread) = scripted(Fake::new(1).step(Duration::from_millis(5)), 1);
    let running = send(&state, endless()).await;
    wait_for("the first to run", || engine.stats().running == 1).await;
    let waiting = send(&state, endless()).await;
    let refused = send(&state, endless()).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()[header::RETRY_AFTER], "1");
    assert!(text(refused).await.contains(r#""type":"rate_limit_error""#));
    drop((running, waiting));
    wait_for("both to be cancelled", || engine.stats().cancelled == 2).await;
    assert_eq!(post(&state, json!({"prompt": [1]})).await.0, StatusCode::OK);
}

#[tokio::test]
async fn dropping_a_response_cancels_within_one_step() {
    // Steps are long, so that on a busy machine the engine does not take another one before this thread runs.
    let fake = Fake::new(1).step(Duration::from_millis(200));
    let calls = fake.calls();
    let (state, engine, _thread) = scripted(fake, 1);
    let response = send(&state, endless()).await;
    wait_for("some steps", || calls.steps.load(SeqCst) > 3).await;
    drop(response);
    let steps = calls.steps.load(SeqCst);
    wait_for("the cancellation", || engine.stats().cancelled == 1).await;
    assert!(calls.steps.load(SeqCst) <= steps + 1);
}

#[tokio::test]
async fn a_panic_before_the_first_token_is_a_500() {
    let (state, ..) = scripted(Fake::new(2), 4);
    let (status, answer) = post(&state, json!({"prompt": [POISON, 1]})).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer["error"]["code"], "generation_failed");
    assert!(!answer.to_string().contains("scripted"), "details belong only in the log");
    assert_eq!(post(&state, json!({"prompt": [1]})).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_panic_in_a_stream_ends_it_with_an_error() {
    let fake = Fake::new(2).step(Duration::from_millis(1));
    let calls = fake.calls();
    let (state, _, _thread) = scripted(fake, 4);
    let response = send(&state, endless()).await;
    let start = calls.steps.load(SeqCst);
    wait_for("some steps", || calls.steps.load(SeqCst) > start + 3).await;
    calls.panic_next_step.store(true, SeqCst);
    let stream = text(response).await;
    let data = events(&stream);
    assert!(data.len() > 2);
    let last: Value = serde_json::from_str(data[data.len() - 1]).unwrap();
    assert_eq!(last["error"]["type"], "server_error");
    assert_eq!(post(&state, json!({"prompt": [1]})).await.0, StatusCode::OK);
}

#[tokio::test]
async fn before_the_model_is_loaded_the_server_is_alive_but_not_ready() {
    let state = AppState::new(ApiOptions::default());
    assert_eq!(send(&state, get("/livez")).await.status(), StatusCode::OK);
    let id = "a".repeat(32);
    let empty = |request: axum::http::request::Builder| request.body(Body::empty()).unwrap();
    for request in [
        get("/health"),
        get("/ready"),
        get("/v1/models"),
        completion(r#"{"prompt": "x"}"#),
        // These need the store, which may not be set yet.
        get("/v1/sessions"),
        empty(Request::post("/v1/sessions")),
        empty(Request::delete(format!("/v1/sessions/ses_{id}"))),
        get(&format!("/v1/responses/resp_{id}")),
        get(&format!("/v1/streams/strm_{id}")),
    ] {
        let response = send(&state, request).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert!(text(response).await.contains(r#""code":"loading""#));
    }
    for path in ["/livez", "/health", "/ready"] {
        assert_eq!(send(&shipped(), get(path)).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn draining_refuses_new_requests_and_finishes_old_ones() {
    let (state, engine, thread) = scripted(Fake::new(2).step(Duration::from_millis(20)), 4);
    let body = json!({"prompt": [1], "max_tokens": 100, "ignore_eos": true, "stream": true});
    let running = send(&state, completion(body.to_string())).await;
    wait_for("it to run", || engine.stats().running == 1).await;
    assert!(!send(&state, get("/ready")).await.headers().contains_key(header::CONNECTION));
    state.drain();
    let refused = [get("/ready"), completion(json!({"prompt": [1]}).to_string()), get("/v1/models")];
    for request in refused {
        let response = send(&state, request).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        // Clients retry on a new connection, which a proxy can give to another server.
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        assert_eq!(response.headers()[header::CONNECTION], "close");
    }
    assert_eq!(send(&state, get("/health")).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(send(&state, get("/livez")).await.status(), StatusCode::OK);
    let (status, answer) = post(&state, json!({"prompt": [1]})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("shutting_down")));
    let stream = text(running).await;
    assert_eq!(*events(&stream).last().unwrap(), "[DONE]");
    thread.join();
}

#[tokio::test]
async fn a_connection_that_stays_open_is_closed_by_the_next_answer_while_the_server_drains() {
    let state = AppState::new(ApiOptions::default());
    let (address, _stop, _server) = listen(state.clone()).await;
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = b"GET /livez HTTP/1.1\r\nhost: test\r\n\r\n";
    socket.write_all(request).await.unwrap();
    let mut answer = vec![0; 1000];
    let read = socket.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200"));
    state.drain();
    socket.write_all(request).await.unwrap();
    let mut rest = String::new();
    socket.read_to_string(&mut rest).await.unwrap();
    assert!(rest.starts_with("HTTP/1.1 200") && rest.contains("connection: close\r\n"), "{rest}");
}

#[tokio::test]
async fn every_response_names_its_request() {
    let state = shipped();
    let id = |response: &axum::http::Response<Body>| response.headers()["x-request-id"].to_str().unwrap().to_owned();
    let (one, other) = (send(&state, get("/health")).await, send(&state, get("/nothing")).await);
    assert!(id(&one).starts_with("req-") && id(&one) != id(&other));
    let given = |value: &str| Request::get("/health").header("x-request-id", value).body(Body::empty()).unwrap();
    assert_eq!(id(&send(&state, given("trace-1.a_B")).await), "trace-1.a_B");
    for forged in ["two words", "a\tb", "", "\"quoted\"", &"x".repeat(129)] {
        assert!(id(&send(&state, given(forged)).await).starts_with("req-"), "{forged:?}");
    }
}

#[tokio::test]
async fn the_page_is_served_under_a_strict_policy() {
    let state = AppState::new(ApiOptions::default());
    for (path, kind) in
        [("/", "text/html"), ("/playground/style.css", "text/css"), ("/playground/app.js", "text/javascript")]
    {
        let response = send(&state, get(path)).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers()[header::CONTENT_TYPE].to_str().unwrap().starts_with(kind));
        let policy = response.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("default-src 'self'") && !policy.contains("unsafe"));
        assert!(!text(response).await.is_empty());
    }
    assert_eq!(send(&state, get("/playground/other.js")).await.status(), StatusCode::NOT_FOUND);
}

/// Starts a server on a free port; it stops when the sender is used or dropped.
async fn listen(state: AppState) -> (std::net::SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        serve(listener, app(state), async { _ = stopped.await }).await.unwrap();
    });
    (address, stop, server)
}

async fn post_raw(address: std::net::SocketAddr, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.unwrap();
    socket
}

/// Reads until `end` arrives.
async fn read_until(socket: &mut TcpStream, end: &str) -> String {
    let mut all = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let count = socket.read(&mut buffer).await.unwrap();
        all.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&all);
        if text.contains(end) {
            return text.into_owned();
        }
        assert_ne!(count, 0, "the connection closed before {end:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_delivered_one_by_one() {
    let fake = Fake::new(2).step(Duration::from_millis(20));
    let calls = fake.calls();
    let (state, _, _thread) = scripted(fake, 4);
    let (address, stop, server) = listen(state).await;
    let body = json!({"prompt": [u32::from(b'a')], "max_tokens": 100, "stream": true});
    let mut socket = post_raw(address, &body).await;
    let head = read_until(&mut socket, r#""text":"b""#).await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("content-type: text/event-stream"), "{head}");
    assert!(head.contains("x-accel-buffering: no") && !head.contains("[DONE]"));
    read_until(&mut socket, r#""text":"d""#).await;
    let steps = calls.steps.load(SeqCst);
    assert!(steps < 99, "the text arrived in one piece after {steps} steps");
    // The server is told to stop during the stream, but finishes it.
    stop.send(()).unwrap();
    let rest = read_until(&mut socket, "[DONE]").await;
    assert!(rest.contains(r#""finish_reason":"length""#));
    drop(socket);
    server.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_connection_cancels() {
    let fake = Fake::new(1).step(Duration::from_millis(5));
    let (state, engine, _thread) = scripted(fake, 4);
    let (address, _stop, _server) = listen(state).await;
    for stream in [true, false] {
        let before = engine.stats().cancelled;
        let body = json!({"prompt": [1], "max_tokens": 100_000, "ignore_eos": true, "stream": stream});
        let socket = post_raw(address, &body).await;
        wait_for("it to run", || engine.stats().running == 1).await;
        drop(socket);
        wait_for("the cancellation", || engine.stats().cancelled == before + 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_stream_sends_keep_alives() {
    let (_, engine, _thread) = scripted(Fake::new(1).step(Duration::from_millis(300)), 4);
    let state = AppState::new(ApiOptions { keep_alive: Duration::from_millis(50), ..ApiOptions::default() });
    state.serve(crate::common::served(engine));
    let body = json!({"prompt": [1], "max_tokens": 2, "stream": true});
    let stream = text(send(&state, completion(body.to_string())).await).await;
    assert!(stream.contains(": alive\n"), "{stream}");
    assert_eq!(*events(&stream).last().unwrap(), "[DONE]");
}
