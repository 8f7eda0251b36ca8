//! Waits for slots are counted in engine steps, which do not depend on the machine's speed.

use std::io::Write;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::json;
use tidegate_server::AppState;
use tidegate_server::api::Keys;

use super::scrape::{self, Scrape};
use super::{scraped, settled, until};
use crate::common::fake::Fake;
use crate::common::{post, scripted, send, text};

#[tokio::test]
async fn a_text_that_waits_for_another_counts_its_steps() {
    let (state, ..) = scripted(Fake::new(1), 8);
    let before = scraped(&state).await;
    let (status, _) = post(&state, json!({"prompt": [[1], [2]], "max_tokens": 5})).await;
    assert_eq!(status, StatusCode::OK);
    let after = until(&state, |scrape| settled(scrape) && scrape.get("request_queue_steps_count") == 2.0).await;
    let since = after.since(&before);
    assert_eq!(since["requests_admitted_total"], 2.0);
    // The second text gets the only slot after the first text's five steps.
    let waited = after.get("request_queue_steps_sum");
    assert!((5.0..10.0).contains(&waited), "{waited}");
    assert_eq!(after.get("requests_admitted_wait_steps_total"), waited);
    assert!(since["engine_steps_total"] >= 10.0, "{since:?}");
    assert_eq!(after.get("request_queue_steps_bucket{le=+Inf}"), 2.0);
    assert_eq!(after.get("requests_displaced_total"), 0.0);
}

const KEYS: [&str; 3] = ["sk-first-0123456789", "sk-second-0123456789", "sk-scraper-0123456789"];

fn with_key(key: &str, request: axum::http::request::Builder, body: Body) -> Request<Body> {
    request.header(header::AUTHORIZATION, format!("Bearer {key}")).body(body).unwrap()
}

async fn scraped_with_key(state: &AppState) -> Scrape {
    let request = with_key(KEYS[2], Request::get("/metrics"), Body::empty());
    scrape::read(&text(send(state, request).await).await, false)
}

#[tokio::test]
async fn texts_that_make_room_for_another_key_are_counted() {
    let (state, engine, _thread) = scripted(Fake::new(1).step(std::time::Duration::from_millis(5)), 2);
    let [first, second, scraper] = KEYS;
    let keys = json!({"keys": [
        {"name": "first", "key": first}, {"name": "second", "key": second},
        {"name": "scraper", "key": scraper, "scopes": ["metrics"]},
    ]});
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(keys.to_string().as_bytes()).unwrap();
    state.set_api_keys(Keys::load(Some(file.path()), &[]).unwrap().unwrap());
    let endless = |key| {
        let body = json!({"prompt": [1], "max_tokens": 100_000, "ignore_eos": true, "stream": true});
        let request = Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
        send(&state, with_key(key, request, Body::from(body.to_string())))
    };
    let running = endless(first).await;
    while engine.stats().running == 0 {
        tokio::task::yield_now().await;
    }
    let waiting = [endless(first).await, endless(first).await];
    assert_eq!(scraped_with_key(&state).await.get("requests_displaced_total"), 0.0);
    let other = endless(second).await;
    assert_eq!(other.status(), StatusCode::OK);
    assert_eq!(scraped_with_key(&state).await.get("requests_displaced_total"), 1.0);
    drop((running, waiting, other));
}
