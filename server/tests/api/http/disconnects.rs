//! Turns whose clients disconnect or stop reading.

use std::time::Duration;

use crate::common::sessions::{app, app_from, prompt, session};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::engine::EngineOptions;

#[tokio::test]
async fn the_client_chooses_what_happens_on_disconnect() {
    let app = app().await;
    for (policy, tokens_after) in [("rollback", false), ("commit", true)] {
        let made = session(&app, json!({})).await;
        let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
        let long = json!({"session": made["id"], "max_tokens": 50_000, "stream": true, "ignore_eos": true,
            "on_disconnect": policy});
        let mut running = app.open("/v1/completions", crate::common::with(prompt("A", json!({})), long), &[]).await;
        running.read_some().await;
        drop(running);
        let after = app.until_free(&path).await;
        assert_eq!(after["tokens"].as_u64().unwrap() > 0, tokens_after, "{policy}: {after}");
        if tokens_after {
            let turns = app.get(&format!("{path}/turns")).await.json();
            assert_eq!(turns["data"][1]["kind"], "interrupted");
            assert!(turns["data"][1]["completion_tokens"].as_u64().unwrap() < 50_000);
        }
    }
}

#[tokio::test]
async fn a_continuing_turn_can_be_resumed_from_any_event() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let body = json!({"session": made["id"], "max_tokens": 300, "stream": true, "ignore_eos": true,
        "on_disconnect": "continue"});
    let mut running = app.open("/v1/completions", crate::common::with(prompt("A", json!({})), body), &[]).await;
    let stream = running.header("x-stream-id");
    let seen = running.read_some().await;
    assert!(seen.starts_with("data: {") || seen.starts_with("id: 0\n"), "{seen}");
    drop(running);
    let path_of_stream = format!("/v1/streams/{stream}");
    let whole = app.get(&path_of_stream).await.text();
    assert!(whole.starts_with("id: 0\n") || whole.contains("\nid: 0\n"), "{whole}");
    assert!(whole.ends_with("[DONE]\n\n"));
    let after = app.until_free(&path).await;
    assert!(after["tokens"].as_u64().unwrap() > 300);
    let rest = app.send(Method::GET, &path_of_stream, Value::Null, &[("last-event-id", "40")]).await.text();
    assert!(rest.contains("id: 41\n") && !rest.contains("id: 40\n"));
    let theirs = app.send(Method::GET, &path_of_stream, Value::Null, &[("authorization", "Bearer b")]).await;
    assert_eq!(theirs.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_stalled_client_does_not_keep_the_session_in_use() {
    // The API ends the turn after three quarters of this limit; the last quarter leaves room for a busy machine.
    let engine = EngineOptions { stall_limit: Duration::from_secs(6), ..EngineOptions::default() };
    let app = app_from(OpenOptions { slots: 2, engine, ..OpenOptions::default() }).await;
    for (policy, moved) in [("rollback", false), ("commit", true)] {
        let made = session(&app, json!({})).await;
        let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
        let body = json!({"session": made["id"], "max_tokens": 50_000, "stream": true, "ignore_eos": true,
            "on_disconnect": policy});
        // The stream is opened, but never read.
        let running = app.open("/v1/completions", crate::common::with(prompt("A", json!({})), body), &[]).await;
        let after = app.until_free(&path).await;
        assert_eq!(after["tokens"].as_u64().unwrap() > 0, moved, "{policy}: {after}");
        drop(running);
    }
}

#[tokio::test]
async fn an_answer_interrupted_before_its_first_token_can_be_continued() {
    let app = app_from(OpenOptions { slots: 1, ..OpenOptions::default() }).await;
    let made = session(&app, json!({})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    // The client disconnects while its long message is being read.
    let text = "The sea was calm. ".repeat(3000);
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"messages": messages, "session": made["id"], "max_tokens": 4, "temperature": 0,
        "stream": true, "on_disconnect": "commit"});
    drop(app.open("/v1/chat/completions", body, &[]).await);
    let after = app.until_free(&path).await;
    let turns = app.get(&format!("{path}/turns")).await.json();
    assert_eq!(turns["data"][1]["kind"], "interrupted", "{turns}");
    assert!(after["tokens"].as_u64().unwrap() > 10_000);
    // Without new text, the interrupted answer continues.
    let more = json!({"messages": [], "session": made["id"], "max_tokens": 4, "temperature": 0});
    let answer = app.post("/v1/chat/completions", more).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let whole = json!({"messages": messages, "max_tokens": 4, "temperature": 0});
    let whole = app.post("/v1/chat/completions", whole).await.json();
    assert_eq!(answer.json()["choices"][0]["message"], whole["choices"][0]["message"]);
}
