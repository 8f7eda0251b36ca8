//! The cost of a fork: one row in the index, no model step and no snapshot bytes.

use crate::common::sessions::quiet;
use axum::http::StatusCode;
use serde_json::json;

#[tokio::test]
async fn one_becomes_64_without_a_forward_pass_and_without_a_snapshot() {
    let app = quiet().await;
    let made = app.post("/v1/sessions", json!({"text": "The fox said to the hare"})).await.json();
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let (engine, store) = (app.engine_stats(), app.store.stats());
    let forks = app.post(&format!("{path}/fork"), json!({"n": 64})).await;
    assert_eq!(forks.status, StatusCode::CREATED, "{}", forks.text());
    let forks = forks.json()["data"].as_array().unwrap().clone();
    assert_eq!(forks.len(), 64);
    assert!(forks.iter().all(|fork| fork["version"] == made["version"] && fork["tokens"] == made["tokens"]));

    assert_eq!(app.engine_stats(), engine, "no step, no prompt, no request");
    let now = app.store.stats();
    assert_eq!(
        (now.versions, now.disk_bytes),
        (store.versions, store.disk_bytes),
        "the number of snapshots is unchanged"
    );
    assert_eq!((now.hits_memory, now.hits_disk), (store.hits_memory, store.hits_disk), "no snapshot was read");
    assert_eq!((now.sessions, now.forks), (store.sessions + 64, store.forks + 64));
    assert_eq!(now.transactions, store.transactions + 1, "all of them at once");

    // The counters do work: a turn on one fork changes them, and creates that fork's first own snapshot.
    let turn = json!({"session": forks[63]["id"], "prompt": " that", "max_tokens": 2});
    assert_eq!(app.post("/v1/completions", turn).await.status, StatusCode::OK);
    assert!(app.engine_stats().prompt_tokens > engine.prompt_tokens);
    assert_eq!(app.store.stats().versions, store.versions + 1);
}
