//! Sessions of models with other mixers: they survive a restart, can be forked, moved and rewound, and continue bit-exactly.

use std::path::Path;

use crate::common::random::written;
use crate::common::sessions::{App, app_on, ids, prompt, session, state_of};
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

/// Returns the config keys of a Mamba-2 model with two heads, each of which has its own B and C.
pub(super) fn mamba2() -> Value {
    json!({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "attention": "mamba2", "intermediate_size": 64,
        "head_dim": 32, "state_size": 16, "n_groups": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "output_norm": false})
}

#[tokio::test]
async fn sessions_survive_a_restart_fork_rewind_and_move_between_servers() {
    for (keys, state) in [
        (json!({"feature_map": "favor"}), StateType::F32),
        (json!({"feature_map": "favor"}), StateType::Bf16),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::F32),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::Bf16),
        (mamba2(), StateType::F32),
        (mamba2(), StateType::Bf16),
    ] {
        let options = || OpenOptions { slots: 2, state, ..OpenOptions::default() };
        sessions_continue(&keys.to_string(), written(&keys).path(), options).await;
    }
}

/// Checks that sessions of a model survive a restart, can be forked, moved and rewound, and continue bit for bit.
pub(super) async fn sessions_continue(name: &str, model: &Path, options: impl Fn() -> OpenOptions) {
    const TEXT: &str = "The fox said to the hare: how long is the river, and how deep the sea?";
    let kept = TempDir::new().unwrap();
    let place = || Location::Folder(kept.path().to_owned());
    let here = app_on(model, options(), place()).await;
    let more = json!({"temperature": 1.0, "seed": 3, "max_tokens": 24, "ignore_eos": true});
    let whole = here.post("/v1/completions", prompt(TEXT, more)).await.json();
    assert!(whole["usage"]["prompt_tokens"].as_u64().unwrap() > 24, "{name}: all of it is in the window");
    let made = session(&here, json!({"seed": 3})).await;
    let (first, after_first) = turn(&here, &made, TEXT).await;
    here.store.close().await.unwrap();
    drop(here);

    let here = app_on(model, options(), place()).await;
    let (second, info) = turn(&here, &made, "").await;
    assert_eq!((&info["restored"], &info["recomputed_tokens"]), (&json!(true), &json!(0)), "{name}");
    let path = |session: &Value, action: &str| format!("/v1/sessions/{}/{action}", session["id"].as_str().unwrap());
    let forked = here.post(&path(&made, "fork"), json!({})).await;
    assert_eq!(forked.status, StatusCode::CREATED, "{name}: {}", forked.text());
    let fork = forked.json()["data"][0].clone();

    let there = app_on(model, options(), Location::Memory).await;
    let moved = there.upload(here.get(&path(&made, "snapshot")).await.body).await;
    assert_eq!(moved.status, StatusCode::CREATED, "{name}: {}", moved.text());
    let moved = moved.json();
    let (third, _) = turn(&here, &made, "").await;
    assert_eq!(turn(&there, &moved, "").await.0, third, "{name}");
    assert_eq!(turn(&here, &fork, "").await.0, third, "{name}");
    let stayed = here.get(&path(&made, "snapshot")).await.body;
    for (app, other) in [(&there, &moved), (&here, &fork)] {
        let went = app.get(&path(other, "snapshot")).await.body;
        assert!(state_of(&stayed) == state_of(&went), "{name}: a bit differs");
    }

    let rewound = here.post(&path(&made, "rewind"), json!({"version": after_first["version"]})).await;
    assert_eq!(rewound.status, StatusCode::OK, "{name}: {}", rewound.text());
    assert_eq!(turn(&here, &made, "").await.0, second, "{name}");
    assert_eq!([first, second, third].concat(), ids(&whole), "{name}");
}
