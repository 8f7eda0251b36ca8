//! Sessions of models with other mixers: they survive a restart, can be moved, and continue bit-exactly.

use crate::common::random::written;
use crate::common::sessions::{App, app_on, prompt, session};
use axum::http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::StateType;
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

/// Generates eight more tokens and returns their ids and the answer's session.
async fn turn(app: &App, session: &Value, text: &str) -> (Vec<u64>, Value) {
    let body = prompt(text, json!({"session": session["id"], "temperature": 1.0, "ignore_eos": true}));
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    (ids(&answer.json()), answer.json()["session"].clone())
}

fn ids(answer: &Value) -> Vec<u64> {
    answer["choices"][0]["token_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

#[tokio::test]
async fn sessions_survive_a_restart_and_snapshots_move_between_servers() {
    const TEXT: &str = "The fox said to the hare: how long is the river, and how deep the sea?";
    for (keys, state) in [
        (json!({"feature_map": "favor"}), StateType::F32),
        (json!({"feature_map": "favor"}), StateType::Bf16),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::F32),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::Bf16),
    ] {
        let (model, kept) = (written(&keys), TempDir::new().unwrap());
        let options = || OpenOptions { slots: 2, state, ..OpenOptions::default() };
        let place = || Location::Folder(kept.path().to_owned());
        let here = app_on(model.path(), options(), place()).await;
        let more = json!({"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": true});
        let whole = here.post("/v1/completions", prompt(TEXT, more)).await.json();
        assert!(whole["usage"]["prompt_tokens"].as_u64().unwrap() > 24, "{keys}: all of it is in the window");
        let made = session(&here, json!({"seed": 3})).await;
        let (first, _) = turn(&here, &made, TEXT).await;
        here.store.close().await.unwrap();
        drop(here);

        let here = app_on(model.path(), options(), place()).await;
        let (second, info) = turn(&here, &made, "").await;
        assert_eq!((&info["restored"], &info["recomputed_tokens"]), (&json!(true), &json!(0)), "{keys}");

        let there = app_on(model.path(), options(), Location::Memory).await;
        let snapshot = |id: &Value| format!("/v1/sessions/{}/snapshot", id.as_str().unwrap());
        let moved = there.upload(here.get(&snapshot(&made["id"])).await.body).await;
        assert_eq!(moved.status, StatusCode::CREATED, "{keys}: {}", moved.text());
        let moved = moved.json();
        let (third, _) = turn(&here, &made, "").await;
        assert_eq!(turn(&there, &moved, "").await.0, third, "{keys}");
        let (stayed, went) =
            (here.get(&snapshot(&made["id"])).await.body, there.get(&snapshot(&moved["id"])).await.body);
        assert!(stayed == went, "{keys}: a bit differs");
        assert_eq!([first, second, third].concat(), ids(&whole), "{keys}");
    }
}
