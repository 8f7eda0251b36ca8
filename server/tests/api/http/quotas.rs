//! Quotas of keys, and which pages may read answers.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::common::fake::Fake;
use crate::common::{scripted, send, text};
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::api::{Keys, Origin};
use tidegate_server::engine::{EngineHandle, EngineThread};
use tidegate_server::{ApiOptions, AppState};

const KEY: &str = "sk-quota-0123456789";
const OTHER: &str = "sk-other-0123456789";

/// A scripted model behind a key with this quota, and another key without any.
fn limited(quota: &Value, step: Duration) -> (AppState, EngineHandle, EngineThread) {
    let (state, engine, thread) = scripted(Fake::new(4).step(step), 16);
    let key = crate::common::with(json!({"name": "limited", "key": KEY}), quota.clone());
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let keys = json!({"keys": [key, {"name": "other", "key": OTHER}]});
    file.write_all(keys.to_string().as_bytes()).unwrap();
    state.set_api_keys(Keys::load(Some(file.path()), &[]).unwrap().unwrap());
    (state, engine, thread)
}

fn completion(key: &str, body: &Value) -> Request<Body> {
    let request = Request::post("/v1/completions").header(header::AUTHORIZATION, format!("Bearer {key}"));
    request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.to_string())).unwrap()
}

fn models(key: &str) -> Request<Body> {
    Request::get("/v1/models").header("x-api-key", key).body(Body::empty()).unwrap()
}

fn short(tokens: usize) -> Value {
    json!({"prompt": [1], "max_tokens": tokens, "ignore_eos": true})
}

fn number(headers: &HeaderMap, name: &str) -> u64 {
    let value = headers.get(name).unwrap_or_else(|| panic!("no {name} in {headers:?}"));
    value.to_str().unwrap().parse().unwrap_or_else(|_| panic!("{name}: {value:?}"))
}

/// The headers of a refusal, and how long it asks to wait.
async fn too_many(response: Response<Body>, names: &str) -> (HeaderMap, u64) {
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let headers = response.headers().clone();
    let body: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    assert_eq!(body["error"]["type"], "rate_limit_error");
    assert!(body["error"]["message"].as_str().unwrap().contains(names), "{body}");
    let wait = number(&headers, "retry-after");
    assert!((1..=60).contains(&wait), "{wait}");
    (headers, wait)
}

#[tokio::test]
async fn requests_are_counted_by_the_minute() {
    let (state, _, _thread) = limited(&json!({"requests_per_minute": 3}), Duration::ZERO);
    for left in (0..3).rev() {
        let response = send(&state, models(KEY)).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(number(response.headers(), "x-ratelimit-limit-requests"), 3);
        assert_eq!(number(response.headers(), "x-ratelimit-remaining-requests"), left);
        assert!(response.headers()["x-ratelimit-reset-requests"].to_str().unwrap().ends_with('s'));
    }
    let (headers, wait) = too_many(send(&state, models(KEY)).await, "3 requests per minute").await;
    assert!((15..=20).contains(&wait), "{wait}");
    assert_eq!(number(&headers, "x-ratelimit-remaining-requests"), 0);
    assert_eq!(headers["x-ratelimit-reset-requests"], "1m0s");
    // Another key's count is its own, and who has no quota has no headers.
    let response = send(&state, models(OTHER)).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key("x-ratelimit-limit-requests"));
    // Nothing that is not let in is counted.
    assert_eq!(send(&state, models("sk-unknown-0123456789")).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn tokens_are_charged_as_they_are_read_and_made() {
    let (state, _, _thread) = limited(&json!({"tokens_per_minute": 60}), Duration::ZERO);
    let first = send(&state, completion(KEY, &short(19))).await;
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(number(first.headers(), "x-ratelimit-limit-tokens"), 60);
    let left = number(send(&state, models(KEY)).await.headers(), "x-ratelimit-remaining-tokens");
    assert!((40..=42).contains(&left), "1 token was read and 19 were made: {left}");
    // It takes more than there is, which nobody could have known.
    let second = send(
        &state,
        completion(KEY, &json!({"prompt": [1, 2, 3], "max_tokens": 77, "ignore_eos": true, "stream": true})),
    );
    assert!(text(second.await).await.contains("[DONE]"));
    let (headers, wait) = too_many(send(&state, completion(KEY, &short(1))).await, "60 tokens per minute").await;
    assert!((38..=41).contains(&wait), "40 are owed, and one has to be there: {wait}");
    assert_eq!(number(&headers, "x-ratelimit-remaining-tokens"), 0);
    assert_eq!(send(&state, models(KEY)).await.status(), StatusCode::OK, "what takes no tokens is not refused");
    assert_eq!(send(&state, completion(OTHER, &short(1))).await.status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_once_are_counted_to_the_end_of_their_texts() {
    let (state, engine, _thread) = limited(&json!({"concurrent_requests": 2}), Duration::from_millis(5));
    let endless = crate::common::with(short(100_000), json!({"stream": true}));
    let running = [send(&state, completion(KEY, &endless)).await, send(&state, completion(KEY, &endless)).await];
    assert!(running.iter().all(|response| response.status() == StatusCode::OK));
    too_many(send(&state, completion(KEY, &short(1))).await, "2 running requests").await;
    assert_eq!(send(&state, completion(OTHER, &short(1))).await.status(), StatusCode::OK);
    drop(running);
    let start = Instant::now();
    while send(&state, completion(KEY, &short(1))).await.status() != StatusCode::OK {
        assert!(start.elapsed() < Duration::from_secs(20), "the places never came back: {:?}", engine.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    while engine.stats().cancelled != 2 {
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", engine.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn from(page: &str, method: &Method) -> Request<Body> {
    let request = Request::builder().method(method).uri("/v1/models").header(header::ORIGIN, page);
    let preflight =
        [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,x-new")];
    let preflight = if method == Method::OPTIONS { &preflight[..] } else { &[] };
    preflight.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(Body::empty()).unwrap()
}

fn pages(origins: &[&str]) -> AppState {
    let cors: Vec<Origin> = origins.iter().map(|origin| origin.parse().unwrap()).collect();
    let state = AppState::new(ApiOptions { cors, ..ApiOptions::default() });
    state.set_api_keys(Keys::load(None, &[KEY.into()]).unwrap().unwrap());
    state
}

fn value<'r>(response: &'r Response<Body>, name: &str) -> &'r str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

#[tokio::test]
async fn other_pages_read_nothing_unless_they_are_named() {
    let (good, bad) = ("https://good.example", "https://bad.example");
    for method in [Method::GET, Method::OPTIONS] {
        let silent = send(&pages(&[]), from(good, &method)).await;
        assert_eq!(silent.status(), StatusCode::UNAUTHORIZED);
        assert!(
            !silent.headers().keys().any(|name| name.as_str().starts_with("access-control")),
            "{:?}",
            silent.headers()
        );
        for origins in [&[good, "http://localhost:3000"][..], &["*"]] {
            let any = origins == ["*"];
            for page in [good, bad] {
                let response = send(&pages(origins), from(page, &method)).await;
                let allowed = if any {
                    "*"
                } else if page == good {
                    good
                } else {
                    ""
                };
                assert_eq!(value(&response, "access-control-allow-origin"), allowed, "{method} {page} {origins:?}");
                assert!(!response.headers().contains_key("access-control-allow-credentials"));
                assert!(response.headers().contains_key("x-request-id"));
                if method == Method::OPTIONS {
                    assert_eq!(response.status(), StatusCode::OK, "a browser asks without a key");
                    assert_eq!(value(&response, "access-control-allow-headers"), "authorization,x-new");
                    assert!(value(&response, "access-control-allow-methods").contains("PATCH"));
                } else {
                    assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "an origin is no key");
                    let exposed = value(&response, "access-control-expose-headers");
                    for name in ["x-request-id", "etag", "x-stream-id", "retry-after", "x-ratelimit-remaining-tokens"] {
                        assert!(exposed.contains(name), "{name} in {exposed}");
                    }
                }
            }
        }
    }
}
