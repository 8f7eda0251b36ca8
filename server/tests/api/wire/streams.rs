//! Streams as OpenAI clients read them: unnamed events, comments, and an error as the last event.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use axum::http::{StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::engine::{EngineOptions, spawn};
use tidegate_server::{ApiOptions, AppState};

use super::kit::{ROUTES, chat, chunks, keys, posting, raw};
use crate::common::fake::{Fake, rules};
use crate::common::{scripted, send, served, shipped, text, with};

fn asking(path: &str) -> Value {
    let body = json!({"max_tokens": 5, "temperature": 0, "ignore_eos": true, "stream": true, "n": 2});
    match path {
        "/v1/completions" => with(body, json!({"prompt": "Once", "echo": true, "logprobs": 1})),
        _ => with(body, json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true})),
    }
}

#[tokio::test]
async fn every_line_is_data_without_an_event_name() {
    for path in ROUTES {
        let response = send(&shipped(), posting(path, asking(path).to_string())).await;
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        let stream = text(response).await;
        let lines: Vec<&str> = stream.lines().filter(|line| !line.is_empty()).collect();
        assert!(lines.len() > 5 && lines.iter().all(|line| line.starts_with("data: ")), "{stream}");
        assert_eq!(lines.iter().filter(|line| **line == "data: [DONE]").count(), 1);
        assert!(stream.ends_with("data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn a_pause_is_filled_with_comments() {
    let fake = Fake::new(1).step(Duration::from_millis(400));
    let (engine, _thread) = spawn(fake, rules(), EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions { keep_alive: Duration::from_millis(20), ..ApiOptions::default() });
    state.serve(served(engine));
    let body = json!({"prompt": [1], "max_tokens": 3, "ignore_eos": true, "stream": true});
    let stream = text(send(&state, posting(ROUTES[0], body.to_string())).await).await;
    let (comments, data): (Vec<&str>, Vec<&str>) =
        stream.lines().filter(|line| !line.is_empty()).partition(|line| line.starts_with(':'));
    assert!(comments.len() >= 3, "{stream}");
    assert!(data.iter().all(|line| line.starts_with("data: ")), "{stream}");
}

#[tokio::test]
async fn an_error_within_a_stream_is_its_last_event_without_done() {
    let fake = Fake::new(2).step(Duration::from_millis(2));
    let calls = fake.calls();
    let (state, _, _thread) = scripted(fake, 8);
    let body = json!({"prompt": [1], "max_tokens": 100_000, "ignore_eos": true, "stream": true, "n": 2});
    let response = send(&state, posting(ROUTES[0], body.to_string())).await;
    while calls.steps.load(SeqCst) < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    calls.panic_next_step.store(true, SeqCst);
    let stream = text(response).await;
    assert!(!stream.contains("event:") && !stream.contains("[DONE]"), "{stream}");
    let mut data: Vec<Value> = crate::common::events(&stream)
        .iter()
        .map(|data| serde_json::from_str(data).unwrap_or_else(|_| panic!("no JSON: {data}")))
        .collect();
    let last = data.pop().unwrap();
    assert_eq!(keys(&last), ["error"]);
    assert_eq!((&last["error"]["type"], &last["error"]["code"]), (&json!("server_error"), &json!("generation_failed")));
    assert!(!data.is_empty() && data.iter().all(|chunk| chunk.get("error").is_none()));
}

#[tokio::test]
async fn usage_is_sent_once_in_a_last_chunk_without_choices() {
    let state = shipped();
    for path in ROUTES {
        let chunks = chunks(&state, path, with(asking(path), json!({"stream_options": {"include_usage": true}}))).await;
        let (last, others) = chunks.split_last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(10)));
        for chunk in others {
            assert_eq!(chunk.as_object().unwrap().get("usage"), Some(&Value::Null), "{chunk}");
            assert_eq!(chunk["choices"].as_array().unwrap().len(), 1);
        }
        for name in ["id", "created", "model", "object", "system_fingerprint"] {
            assert!(others.iter().all(|chunk| chunk[name] == last[name] && !last[name].is_null()), "{name}");
        }
    }
}

#[tokio::test]
async fn the_chunk_that_ends_a_text_has_its_timings() {
    let state = shipped();
    for path in ROUTES {
        let chunks = chunks(&state, path, asking(path)).await;
        for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
            let has_timings = choice["timings"]["decode_ms"].as_f64().is_some_and(|ms| ms > 0.0);
            assert_eq!(has_timings, !choice["finish_reason"].is_null(), "{choice}");
        }
        let (status, whole) = raw(&state, path, with(asking(path), json!({"stream": false})).to_string()).await;
        assert_eq!(status, StatusCode::OK);
        for choice in whole["choices"].as_array().unwrap() {
            assert_eq!(keys(&choice["timings"]), ["decode_ms", "prefill_ms", "queue_ms"]);
        }
    }
}

#[tokio::test]
async fn errors_have_openais_shape_whatever_their_status() {
    let (state, ..) = scripted(Fake::new(1), 1);
    let wrong = json!({"prompt": "x", "model": "gpt-4"}).to_string();
    let long = json!({"prompt": "x".repeat(20_000)}).to_string();
    let many = json!({"prompt": [1], "n": 2}).to_string();
    for (body, expected) in [
        (r#"{"prompt": 1}"#.into(), StatusCode::BAD_REQUEST),
        (wrong, StatusCode::NOT_FOUND),
        (long, StatusCode::PAYLOAD_TOO_LARGE),
        (many, StatusCode::BAD_REQUEST),
    ] {
        let (status, answer) = raw(&state, ROUTES[0], body).await;
        assert_eq!(status, expected, "{answer}");
        let error = &answer["error"];
        assert_eq!(keys(error), ["code", "message", "param", "type"]);
        assert_eq!(error["type"], "invalid_request_error");
    }
    let (status, answer) =
        chat(&shipped(), json!({"messages": [{"role": "user", "content": "x"}], "model": "m"})).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::NOT_FOUND, &json!("model")));
}
