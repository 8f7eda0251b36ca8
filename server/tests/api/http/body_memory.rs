//! Memory for request bodies: bounded per owner, and released once a body is parsed.

use std::convert::Infallible;
use std::future::pending;

use axum::body::{Body, Bytes};
use axum::http::{Request, Response, StatusCode, header};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::Location;
use tidegate_server::{ApiOptions, AppState};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::common::fake::Fake;
use crate::common::{checkpoint, scripted, send, served, sessions, text, with};

const MIB: usize = 1 << 20;

/// More than the 64 MiB that one owner may hold while others hold none.
const LARGE: usize = 65 * MIB;

fn fake() -> AppState {
    let (_, engine, _thread) = scripted(Fake::new(4), 16);
    let state = AppState::new(ApiOptions { max_body_bytes: LARGE, ..ApiOptions::default() });
    state.serve(served(engine));
    state
}

fn completion(owner: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post("/v1/completions").header(header::AUTHORIZATION, format!("Bearer {owner}"));
    request.header(header::CONTENT_TYPE, "application/json").body(body.into()).unwrap()
}

fn short() -> Value {
    json!({"prompt": [1], "max_tokens": 1})
}

async fn ask(state: &AppState, owner: &str) -> Response<Body> {
    send(state, completion(owner, short().to_string())).await
}

/// Checks that a body of the owner is refused for now.
async fn is_refused(state: &AppState, owner: &str) {
    let response = ask(state, owner).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    assert_eq!(response.headers()[header::CONNECTION], "close");
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(answer["error"]["type"], "rate_limit_error");
    assert_eq!(answer["error"]["code"], "bodies_busy");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("may take 65536 KiB until they are parsed"), "{message}");
}

/// Sends a body that never ends, and returns once the server has received `bytes` of it and asks for more.
async fn begin(state: &AppState, owner: &str, bytes: usize) -> JoinHandle<Response<Body>> {
    let (received, is_received) = oneshot::channel();
    let first = stream::once(async move { Ok::<_, Infallible>(Bytes::from(vec![b' '; bytes])) });
    let rest = stream::once(async move {
        received.send(()).unwrap();
        pending().await
    });
    let (state, request) = (state.clone(), completion(owner, Body::from_stream(first.chain(rest))));
    let sent = tokio::spawn(async move { send(&state, request).await });
    is_received.await.expect("the body is received");
    sent
}

/// Closes the connection of an unfinished body.
async fn close(sent: JoinHandle<Response<Body>>) {
    sent.abort();
    assert!(sent.await.unwrap_err().is_cancelled());
}

#[tokio::test]
async fn unfinished_bodies_of_one_owner_do_not_take_the_memory_of_others() {
    let state = fake();
    let mut unfinished = Vec::new();
    for _ in 0..4 {
        unfinished.push(begin(&state, "ann", 16 * MIB).await);
    }
    is_refused(&state, "ann").await;
    let models = Request::get("/v1/models").header(header::AUTHORIZATION, "Bearer ann").body(Body::empty()).unwrap();
    assert_eq!(send(&state, models).await.status(), StatusCode::OK, "it has no body");
    assert_eq!(ask(&state, "ben").await.status(), StatusCode::OK);
    close(begin(&state, "ben", 16 * MIB).await).await;
    is_refused(&state, "ann").await;
    close(unfinished.remove(0)).await;
    assert_eq!(ask(&state, "ann").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_body_larger_than_the_part_of_its_owner_is_received_alone() {
    let state = fake();
    let unfinished = begin(&state, "ann", LARGE).await;
    is_refused(&state, "ann").await;
    assert_eq!(ask(&state, "ben").await.status(), StatusCode::OK);
    close(unfinished).await;
    let endless = with(short(), json!({"max_tokens": 100_000, "ignore_eos": true, "stream": true})).to_string();
    // JSON may start with any number of spaces.
    let padded = " ".repeat(LARGE - endless.len()) + &endless;
    let stream = send(&state, completion("ann", padded)).await;
    assert_eq!(stream.status(), StatusCode::OK);
    assert_eq!(ask(&state, "ann").await.status(), StatusCode::OK, "a stream does not hold its body");
    drop(stream);
}

#[tokio::test]
async fn the_longest_upload_is_received() {
    let served = open(&checkpoint(), &OpenOptions::default()).unwrap().0;
    let most = served.codec.max_file_bytes();
    assert!(most > ApiOptions::default().max_body_bytes);
    let app = sessions::app_of(served, Location::Memory).await;
    let whole = app.upload(vec![0; most].into()).await;
    assert_eq!((whole.status, whole.param()), (StatusCode::BAD_REQUEST, "snapshot".into()), "{}", whole.text());
    assert_eq!(app.upload(vec![0; most + 1].into()).await.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn a_body_that_no_handler_accepts_is_refused_before_it_arrives() {
    let state = fake();
    let never = || Body::from_stream(stream::once(pending::<Result<Bytes, Infallible>>()));
    let declared = |length: usize, kind: &str, more: Option<(header::HeaderName, &str)>| {
        let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, kind);
        let request = more.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        request.header(header::CONTENT_LENGTH, length).body(never()).unwrap()
    };
    let (json, compressed) = ("application/json", Some((header::CONTENT_ENCODING, "gzip")));
    for (request, status, message) in [
        (
            declared(LARGE + 1, json, None),
            StatusCode::PAYLOAD_TOO_LARGE,
            "the body must be at most 68157440 bytes long",
        ),
        (declared(9, "text/plain", None), StatusCode::UNSUPPORTED_MEDIA_TYPE, "content-type must be application/json"),
        (declared(9, json, compressed), StatusCode::UNSUPPORTED_MEDIA_TYPE, "content-encoding gzip is not supported"),
    ] {
        let response = send(&state, request).await;
        assert_eq!((response.status(), &response.headers()[header::CONNECTION]), (status, &"close".parse().unwrap()));
        let answer: Value = serde_json::from_str(&text(response).await).unwrap();
        assert_eq!(answer["error"]["message"], message);
    }
    // A handler that reads no body answers as usual.
    let unknown = Request::post("/v1/nothing").header(header::CONTENT_LENGTH, LARGE + 1).body(never()).unwrap();
    assert_eq!(send(&state, unknown).await.status(), StatusCode::NOT_FOUND);
}
