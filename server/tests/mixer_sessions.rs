//! Sessions of models whose heads remember more than sums: kept across a restart, taken elsewhere, gone on with to the
//! bit.

mod common;

use std::path::Path;

use axum::http::StatusCode;
use common::sessions::{App, app_on, prompt, session};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_model::random::Normals;
use tidegate_model::{DecoderConfig, StateType, checkpoint};
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Place;

/// A checkpoint of random weights with these keys beside the pinned one's own, and its tokenizer.
fn written(keys: &Value) -> TempDir {
    let (folder, pinned) =
        (TempDir::new().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/fixtures/tiny"));
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(pinned.join(name), folder.path().join(name)).unwrap();
    }
    let config = serde_json::from_slice(&std::fs::read(pinned.join("config.json")).unwrap()).unwrap();
    let config = common::with(config, keys.clone()).to_string();
    std::fs::write(folder.path().join("config.json"), &config).unwrap();
    let mut normals = Normals::new(5);
    let tensors: Vec<_> = checkpoint::tensors(&DecoderConfig::from_json(&config).unwrap())
        .into_iter()
        .map(|(name, shape)| {
            let number = |_| (0.4 * normals.normal() as f32 + 0.2).to_le_bytes();
            let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(number).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap();
        (name.as_str(), view)
    });
    serialize_to_file(views, None, &folder.path().join(checkpoint::SAFETENSORS)).unwrap();
    folder
}

/// Eight more tokens -> their ids, and the session's part of the answer.
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
async fn a_session_outlives_the_process_and_a_snapshot_its_server() {
    const TEXT: &str = "The fox said to the hare: how long is the river, and how deep the sea?";
    for (keys, state) in [
        (json!({"feature_map": "favor"}), StateType::F32),
        (json!({"feature_map": "favor"}), StateType::Bf16),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::F32),
        (json!({"attention": "hybrid", "sliding_window": 24, "position_embedding": "rope"}), StateType::Bf16),
    ] {
        let (model, kept) = (written(&keys), TempDir::new().unwrap());
        let options = || OpenOptions { slots: 2, state, ..OpenOptions::default() };
        let place = || Place::Folder(kept.path().to_owned());
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

        let there = app_on(model.path(), options(), Place::Memory).await;
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
