//! Quotas of API keys, and which web pages may read answers.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::common::fake::{Fake, POISON};
use crate::common::{scripted, send, text};
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::api::{Keys, Origin};
use tidegate_server::engine::{EngineHandle, EngineThread};
use tidegate_server::{ApiOptions, AppState};

const KEY: &str = "sk-quota-0123456789";
const OTHER: &str = "sk-other-0123456789";

/// Returns a scripted model behind a key with this quota and another key without one.
fn limited(quota: &Value, step: Duration) -> (AppState, EngineHandle, EngineThread) {
    let (state, engine, thread) = scripted(Fake::new(4).step(step), 256);
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

/// Checks that a request is over its quota; returns the headers and the seconds to wait.
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
    let reset = headers["x-ratelimit-reset-requests"].to_str().unwrap();
    assert!(["1m0s", "59s", "58s", "57s", "56s", "55s"].contains(&reset), "{reset}");
    // Another key is not affected, and a key without a quota gets no quota headers.
    let response = send(&state, models(OTHER)).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key("x-ratelimit-limit-requests"));
    // A request that fails auth is not counted.
    assert_eq!(send(&state, models("sk-unknown-0123456789")).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn tokens_are_reserved_and_the_rest_is_given_back() {
    let (state, _, _thread) = limited(&json!({"tokens_per_minute": 6000}), Duration::ZERO);
    let first = send(&state, completion(KEY, &short(1999))).await;
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(number(first.headers(), "x-ratelimit-limit-tokens"), 6000);
    // The bucket refills by 100 tokens a second: each bound leaves room for ten seconds.
    let left = left(&state).await;
    assert!((4000..5000).contains(&left), "1 token was read and 1,999 were made: {left}");
    let (headers, wait) = too_many(send(&state, completion(KEY, &short(5800))).await, "6000 tokens per minute").await;
    assert!((8..=18).contains(&wait), "about 1,800 are missing: {wait}");
    assert!(number(&headers, "x-ratelimit-remaining-tokens") >= 4000, "a refusal reserves nothing");
    // This request ends after three tokens, and the rest of its reservation is given back.
    let brief = json!({"prompt": [252], "max_tokens": 3900});
    assert_eq!(send(&state, completion(KEY, &brief)).await.status(), StatusCode::OK);
    assert!(self::left(&state).await >= 3990);
    // So is the reservation of a request that fails.
    let broken = json!({"prompt": [POISON, 1], "max_tokens": 3900});
    assert_eq!(send(&state, completion(KEY, &broken)).await.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(self::left(&state).await >= 3980);
    assert_eq!(send(&state, models(KEY)).await.status(), StatusCode::OK, "what takes no tokens is not refused");
    assert_eq!(send(&state, completion(OTHER, &short(9000))).await.status(), StatusCode::OK);
}

/// Returns how many tokens the key has left.
async fn left(state: &AppState) -> u64 {
    number(send(state, models(KEY)).await.headers(), "x-ratelimit-remaining-tokens")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_gets_its_tokens_back() {
    let (state, _, _thread) = limited(&json!({"tokens_per_minute": 60_000}), Duration::from_millis(5));
    let running = completion(KEY, &crate::common::with(short(50_000), json!({"stream": true})));
    let running = send(&state, running).await;
    assert!(number(running.headers(), "x-ratelimit-remaining-tokens") < 20_000);
    too_many(send(&state, completion(KEY, &short(55_000))).await, "may use").await;
    drop(running);
    let start = Instant::now();
    while left(&state).await < 45_000 {
        // Refilling the bucket alone would take half a minute.
        assert!(start.elapsed() < Duration::from_secs(20), "they never came back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Checks the refusal of a request that could never succeed: it says what to lower.
async fn too_large(state: &AppState, request: Request<Body>, param: &str, words: &str) {
    let response = send(state, request).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!response.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(value(&response, "x-should-retry"), "false");
    let body: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!((&body["error"]["code"], &body["error"]["param"]), (&json!("rate_limit_exceeded"), &json!(param)));
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("request too large") && message.contains(words), "{message}");
}

#[tokio::test]
async fn requests_beyond_their_quota_are_refused_before_they_run() {
    let quota = json!({"tokens_per_minute": 1000, "concurrent_requests": 4});
    let (state, engine, _thread) = limited(&quota, Duration::ZERO);
    let large = |more: Value| completion(KEY, &crate::common::with(short(1), more));
    too_large(&state, large(json!({"n": 128, "max_tokens": 15_000})), "n", "at most 4 texts").await;
    too_large(&state, large(json!({"best_of": 5})), "best_of", "(concurrent_requests)").await;
    too_large(&state, large(json!({"prompt": vec![vec![1]; 5]})), "prompt", "found 5").await;
    too_large(&state, large(json!({"max_tokens": 1000})), "max_tokens", "1000 per minute").await;
    too_large(&state, large(json!({"n": 2, "max_tokens": 500})), "max_tokens", "2 x 500").await;
    too_large(&state, large(json!({"prompt": vec![1; 1000]})), "prompt", "1000 of prompts").await;
    assert_eq!((engine.stats().finished, engine.stats().prompt_tokens), (0, 0));
    assert_eq!(send(&state, large(json!({"n": 4, "max_tokens": 20}))).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_without_a_bound_gets_a_part_of_the_quota() {
    let (state, _, _thread) = limited(&json!({"tokens_per_minute": 40}), Duration::ZERO);
    let body = json!({"prompt": [1], "n_predict": -1, "ignore_eos": true});
    let request =
        Request::post("/completion").header("x-api-key", KEY).header(header::CONTENT_TYPE, "application/json");
    let response = send(&state, request.body(Body::from(body.to_string())).unwrap()).await;
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(answer["tokens_predicted"], 10, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_counts_as_many_times_as_it_has_texts() {
    let (state, _, _thread) = limited(&json!({"concurrent_requests": 4}), Duration::from_millis(5));
    let body = |texts: u64| completion(KEY, &crate::common::with(short(100_000), json!({"stream": true, "n": texts})));
    let running = send(&state, body(3)).await;
    assert_eq!(running.status(), StatusCode::OK);
    too_many(send(&state, body(2)).await, "4 texts at once").await;
    assert_eq!(send(&state, body(1)).await.status(), StatusCode::OK);
    drop(running);
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
