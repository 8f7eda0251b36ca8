//! Memory for log probabilities: bounded per request, per owner and in total.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{EngineOptions, Limits, spawn};
use tidegate_server::session::{Location, Store, StoreOptions};
use tidegate_server::{ApiOptions, AppState, Served};

use crate::common::fake::{Fake, POISON, rules};
use crate::common::{checkpoint, get, post, scripted, send, served, shipped, text, with};

/// Tokens that reserve 56.4 MiB with 20 alternatives each; one request may reserve 64 MiB.
const MANY: usize = 22_000;

async fn ask(state: &AppState, owner: &str, path: &str, body: Value) -> Response<Body> {
    let request = Request::post(path).header(header::AUTHORIZATION, format!("Bearer {owner}"));
    let request = request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body.to_string()));
    send(state, request.unwrap()).await
}

async fn json_of(response: Response<Body>) -> Value {
    serde_json::from_str(&text(response).await).unwrap()
}

/// A request that could list many log probabilities, but ends after a few.
fn large() -> Value {
    json!({"prompt": [250], "max_tokens": MANY, "logprobs": 20})
}

async fn complete(state: &AppState, owner: &str, body: Value) -> Response<Body> {
    ask(state, owner, "/v1/completions", body).await
}

/// Checks that the request was refused for now.
async fn refused(response: Response<Body>, reason: &str) {
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()[header::RETRY_AFTER], "1");
    let answer = json_of(response).await;
    assert_eq!(answer["error"]["code"], "logprobs_busy");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains(reason), "{message}");
}

#[tokio::test]
async fn more_than_a_response_may_hold_is_refused_in_every_format() {
    let state = shipped();
    let message = json!([{"role": "user", "content": "Hello"}]);
    let prompt = vec![7; 25_000];
    for (path, body, param, limit) in [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 24_967, "logprobs": 20}), "max_tokens", "24966"),
        (
            "/v1/completions",
            json!({"prompt": ["A", "B"], "n": 2, "max_tokens": 6242, "logprobs": 20}),
            "max_tokens",
            "6241",
        ),
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 524_289, "logprobs": 0}), "max_tokens", "524288"),
        (
            "/v1/completions",
            json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 20}),
            "prompt",
            "24966",
        ),
        (
            "/v1/completions",
            json!({"prompt": prompt, "max_tokens": 0, "echo": true, "logprobs": 20, "stream": true}),
            "prompt",
            "24966",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": message, "max_completion_tokens": 24_967, "logprobs": true, "top_logprobs": 20}),
            "max_completion_tokens",
            "24966",
        ),
        ("/completion", json!({"prompt": "Once", "n_predict": 24_967, "n_probs": 20}), "n_predict", "24966"),
    ] {
        let response = ask(&state, "ann", path, body.clone()).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{path} {param} {limit}");
        let answer = json_of(response).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!(answer["error"]["param"], param, "{message}");
        assert!(message.starts_with(param) && message.contains(&format!("at most {limit}")), "{message}");
        assert!(message.contains("64 MiB"), "{message}");
        if param != "prompt" {
            // A stream reserves nothing.
            let streamed = ask(&state, "ann", path, with(body, json!({"stream": true}))).await;
            assert_eq!(streamed.status(), StatusCode::OK, "{path} {limit}");
        }
    }
}

#[tokio::test]
async fn an_owner_cannot_take_the_memory_of_others() {
    let (state, ..) = scripted(Fake::new(4), 16);
    let first = complete(&state, "ann", large()).await;
    let second = complete(&state, "ann", large()).await;
    assert_eq!((first.status(), second.status()), (StatusCode::OK, StatusCode::OK));
    // Both requests have ended, but their responses have not been read.
    refused(complete(&state, "ann", large()).await, "of your requests may hold 128 MiB").await;
    for more in [json!({"stream": true}), json!({"logprobs": null}), json!({"max_tokens": 20})] {
        assert_eq!(complete(&state, "ann", with(large(), more)).await.status(), StatusCode::OK);
    }
    // Each other owner gets half of what is left, and never nothing.
    let bens = complete(&state, "ben", large()).await;
    assert_eq!(bens.status(), StatusCode::OK);
    refused(complete(&state, "ben", large()).await, "half of what others leave").await;
    refused(complete(&state, "eve", large()).await, "of your requests may hold 43 MiB").await;
    assert_eq!(complete(&state, "eve", with(large(), json!({"max_tokens": 2000}))).await.status(), StatusCode::OK);
    // Reading a response releases its memory.
    assert_eq!(json_of(first).await["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 5);
    let third = complete(&state, "ann", with(large(), json!({"max_tokens": 10_000}))).await;
    assert_eq!(third.status(), StatusCode::OK);
    refused(complete(&state, "ann", large()).await, "of your requests").await;
}

/// Sends a completion with an idempotency key.
async fn repeat(state: &AppState, key: &str, body: Value) -> Response<Body> {
    let request = Request::post("/v1/completions").header(header::AUTHORIZATION, "Bearer ann");
    let request = request.header(header::CONTENT_TYPE, "application/json").header("idempotency-key", key);
    send(state, request.body(Body::from(body.to_string())).unwrap()).await
}

#[tokio::test]
async fn repeated_responses_take_memory_until_they_are_read() {
    let (engine, _thread) = spawn(Fake::new(4), rules(), EngineOptions::default()).unwrap();
    let (state, served) = (AppState::new(ApiOptions::default()), served(engine));
    state.set_store(Store::open(StoreOptions::new(Location::Memory), served.codec.clone()).await.unwrap());
    state.serve(served);
    // Memory for the stored copy is reserved as well.
    let first = repeat(&state, "large", large()).await;
    assert_eq!(first.status(), StatusCode::OK);
    refused(complete(&state, "ann", large()).await, "113 MiB are in use").await;
    drop(first);

    let few = |stream: bool| with(large(), json!({"max_tokens": 20, "stream": stream}));
    for (key, stream) in [("whole", false), ("stream", true)] {
        let first = text(repeat(&state, key, few(stream)).await).await;
        assert!(first.len() > 512, "{first}");
        // All but 512 bytes of what the owner may hold.
        let mut most = Vec::new();
        for _ in 0..2 {
            most.push(complete(&state, "ann", with(large(), json!({"max_tokens": 24_966}))).await);
        }
        assert!(most.iter().all(|response| response.status() == StatusCode::OK));
        refused(repeat(&state, key, few(stream)).await, "repeated responses").await;
        most.pop();
        let again = repeat(&state, key, few(stream)).await;
        assert_eq!(again.status(), StatusCode::OK);
        let more = || complete(&state, "ann", with(large(), json!({"max_tokens": 24_966})));
        refused(more().await, "of your requests").await;
        assert!(text(again).await.contains("logprobs"));
        assert_eq!(more().await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_default_length_is_lowered_only_by_the_limit_itself() {
    let (state, ..) = scripted(Fake::new(4), 128);
    let body = json!({"prompt": [34], "n": 100, "logprobs": 20, "ignore_eos": true});
    let answer = json_of(complete(&state, "ann", body).await).await;
    assert_eq!(answer["usage"]["completion_tokens"], 1600, "{answer}");
}

#[tokio::test]
async fn streams_that_end_with_their_whole_text_have_a_greatest_length() {
    let (served, _) = open(&checkpoint(), &OpenOptions::default()).unwrap();
    let state = AppState::new(ApiOptions { max_text_bytes: 4, ..ApiOptions::default() });
    let name = served.name.clone();
    state.serve(served);
    for (path, body) in [
        ("/v1/responses", json!({"input": "Once", "store": false, "max_output_tokens": 40})),
        ("/v1/messages", json!({"model": name, "messages": [{"role": "user", "content": "Once"}], "max_tokens": 40})),
    ] {
        let streamed = text(ask(&state, "ann", path, with(body, json!({"stream": true}))).await).await;
        assert!(streamed.contains("more than 4 bytes"), "{path}: {streamed}");
    }
}

#[tokio::test]
async fn memory_is_released_after_errors_and_disconnects() {
    let (state, engine, _thread) = scripted(Fake::new(4).step(Duration::from_millis(1)), 16);
    for _ in 0..3 {
        let failed = complete(&state, "ann", with(large(), json!({"prompt": [POISON, 1]}))).await;
        assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    let endless = || with(large(), json!({"ignore_eos": true}));
    let running = [(); 2].map(|()| {
        let (state, body) = (state.clone(), endless());
        tokio::spawn(async move { complete(&state, "ann", body).await })
    });
    while engine.stats().running < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    refused(complete(&state, "ann", large()).await, "of your requests").await;
    // The clients disconnect.
    running.iter().for_each(tokio::task::JoinHandle::abort);
    while complete(&state, "ann", large()).await.status() != StatusCode::OK {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(send(&state, get("/health")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_text_of_the_greatest_length_gets_a_part_of_the_limit() {
    let (state, ..) = scripted(Fake::new(4), 16);
    for (more, longest) in
        [(json!({"n_probs": 20}), 1560), (json!({"n_probs": 20, "stream": true}), 99_864), (json!({}), 100_000)]
    {
        let body = with(json!({"prompt": [250], "n_predict": -1}), more);
        let answer = text(ask(&state, "ann", "/completion", body).await).await;
        let settings = format!(r#""n_predict":{longest},"#);
        assert!(answer.contains(&settings), "{settings} is not in {answer}");
    }
}

#[tokio::test]
async fn a_text_that_is_not_streamed_has_a_greatest_length() {
    let (engine, _thread) = spawn(Fake::new(4), rules(), EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions { max_text_bytes: 80, ..ApiOptions::default() });
    state.serve(served(engine));
    let body = |tokens: usize| json!({"prompt": [34], "max_tokens": tokens, "ignore_eos": true});
    let (status, answer) = post(&state, body(80)).await;
    assert_eq!((status, answer["choices"][0]["text"].as_str().unwrap().len()), (StatusCode::OK, 80), "{answer}");
    for more in [json!({"max_tokens": 81}), json!({"n": 2, "max_tokens": 41})] {
        let (status, answer) = post(&state, with(body(0), more)).await;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("response_too_large")));
        assert!(answer["error"]["message"].as_str().unwrap().contains("more than 80 bytes"), "{answer}");
    }
    let streamed = complete(&state, "ann", with(body(90), json!({"stream": true}))).await;
    assert!(text(streamed).await.trim_end().ends_with("[DONE]"));
}

#[tokio::test]
async fn a_prompt_may_be_scored_as_far_as_its_log_probabilities_fit() {
    let (engine, _thread) = spawn(Fake::new(4), rules(), EngineOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    let limits = Limits { vocab_size: 256, max_prompt_tokens: 1_000_000, max_tokens: 100, sources: None };
    state.serve(Served { limits, ..served(engine) });
    let body = |tokens: usize| json!({"prompt": vec![34; tokens], "echo": true, "max_tokens": 0, "logprobs": 1});
    for most in [0, 1] {
        let response = complete(&state, "ann", with(body(100_001), json!({"max_tokens": most}))).await;
        assert_eq!(response.status(), StatusCode::OK);
        let answer = json_of(response).await;
        let lists = &answer["choices"][0]["logprobs"];
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(lists[name].as_array().unwrap().len(), 100_001 + most, "{name}");
        }
        assert!(lists["token_logprobs"][0].is_null());
        assert!(lists["token_logprobs"].as_array().unwrap()[1..].iter().all(Value::is_number));
    }
    let refused = complete(&state, "ann", body(262_145)).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let answer = json_of(refused).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(answer["error"]["param"], "prompt");
    assert!(message.contains("at most 262144 tokens in all echoed texts, found 262145"), "{message}");
    assert!(message.contains("a response may hold 64 MiB"), "{message}");
}
