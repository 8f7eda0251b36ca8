//! Texts that are too long for the model: each route refuses them, the longest before they are encoded, and names the
//! field.

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::engine::{EngineOptions, EngineThread, spawn};
use tidegate_server::{ApiOptions, AppState};

use crate::common::fake::{Fake, rules};
use crate::common::parrot::parrot;
use crate::common::{send, served, text};

/// Returns a scripted model that reads 1000 tokens.
fn state() -> (AppState, EngineThread) {
    let (engine, thread) = spawn(Fake::new(1), rules(), EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    state.serve(served(engine));
    (state, thread)
}

async fn refused(state: &AppState, path: &str, body: &Value) -> Value {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path}");
    serde_json::from_str(&text(response).await).unwrap()
}

/// Checks that an error has the code for too long a context and names `param`.
fn check_names(error: &Value, param: &str) {
    let error = &error["error"];
    let names_code = error["code"] == "context_length_exceeded" || error["type"] == "exceed_context_size_error";
    assert!(names_code && error["param"] == param, "{error}");
}

#[tokio::test]
async fn every_route_names_the_code_and_the_parameter_that_was_sent() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("ok", "{% for m in messages %}{{ m.content }}{% endfor %}", folder.path());
    // Texts of the first length are refused before they are encoded, those of the second after.
    for words in [200_000, 11_000] {
        let long = "word ".repeat(words);
        let messages = json!([{"role": "user", "content": long}]);
        for (path, param, body) in [
            ("/v1/completions", "prompt", json!({"prompt": long})),
            ("/v1/chat/completions", "messages", json!({"messages": messages})),
            ("/v1/responses", "input", json!({"input": long, "store": false})),
            ("/v1/messages", "messages", json!({"model": "fake", "max_tokens": 9, "messages": messages})),
            ("/completion", "prompt", json!({"prompt": long})),
            ("/tokenize", "messages", json!({"messages": messages})),
        ] {
            check_names(&refused(&state, path, &body).await, param);
        }
    }
    for path in ["/v1/completions", "/completion"] {
        check_names(&refused(&state, path, &json!({"prompt": vec![5; 10_001]})).await, "prompt");
    }
    check_names(&refused(&state, "/detokenize", &json!({"tokens": vec![5; 10_001]})).await, "tokens");
}

#[tokio::test]
async fn a_text_that_has_too_many_tokens_in_any_case_is_refused_unread() {
    let (state, _thread) = state();
    let long = "word ".repeat(200_000);
    for (path, param) in
        [("/v1/completions", "prompt"), ("/completion", "prompt"), ("/tokenize", "prompt"), ("/tokenize", "content")]
    {
        let error = refused(&state, path, &json!({param: long})).await;
        check_names(&error, param);
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(message, format!("{param} must be at most 1000 tokens long, found more"), "{path}");
    }
    let mixed = json!({"prompt": [1, long, 2]});
    let error = refused(&state, "/completion", &mixed).await;
    assert!(error["error"]["message"].as_str().unwrap().ends_with("found more"), "{error}");
}

#[tokio::test]
async fn megabytes_without_a_space_are_refused_unread() {
    let (engine, _thread) = spawn(Fake::new(1), rules(), EngineOptions::default()).unwrap();
    let mut model = served(engine);
    model.limits.max_prompt_tokens = 1_000_000;
    let state = AppState::new(ApiOptions::default());
    state.serve(model);
    let error = refused(&state, "/v1/completions", &json!({"prompt": "1".repeat(4_000_000)})).await;
    assert_eq!(error["error"]["param"], "prompt");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("a space or punctuation between words"), "{message}");
}
