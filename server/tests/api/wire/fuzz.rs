//! Random changes to valid requests in every format: the answer is a success or an error that the client is told about,
//! never a failure of the server.

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::{ApiOptions, AppState};

use crate::common::{checkpoint, fuzz, send, text};

/// Field names and values of the formats, and numbers at the limits of their types.
const WORDS: [&str; 32] = [
    "\"n\":",
    "\"stop\":",
    "\"logprobs\":",
    "\"logit_bias\":",
    "\"tools\":",
    "\"regex\":",
    "\"stream\":",
    "\"seed\":",
    "\"echo\":",
    "\"top_k\":",
    "\"min_p\":",
    "\"session\":",
    "\"state\":",
    "\"grammar\":",
    "\"suffix\":",
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "\"\"",
    "0",
    "-1",
    "1e999",
    "-0.0",
    "18446744073709551616",
    "\\u0000",
    "\\ud800",
    "[[[[",
    "{\"type\":",
    "\"json_schema\"",
    ",",
];

#[tokio::test]
async fn no_request_makes_the_server_fail() {
    let options = OpenOptions { max_tokens: 8, max_prompt_tokens: 512, slots: 4, ..OpenOptions::default() };
    let (served, _thread) = open(&checkpoint(), &options).unwrap();
    let state = AppState::new(ApiOptions::default());
    state.serve(served);
    let routes = requests();
    let seeds: Vec<_> = routes.iter().map(|(_, body)| body.to_string().into_bytes()).collect();
    for fuzz::Input { number, seed, bytes: body } in fuzz::inputs(&seeds, &WORDS) {
        let path = routes[seed].0;
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let response = send(&state, request.body(Body::from(body.clone())).unwrap()).await;
        let (status, answer) = (response.status(), text(response).await);
        let shown = String::from_utf8_lossy(&body);
        // 501: the request asks to store a response, and this server has no store.
        assert!(
            status.as_u16() < 500 || matches!(status.as_u16(), 501 | 503),
            "input {number} to {path}: {status} {answer}\n{shown}"
        );
        if !status.is_success() {
            let error: Value = serde_json::from_str(&answer).unwrap_or_default();
            assert!(error["error"]["message"].is_string(), "input {number} to {path}: {status} {answer}\n{shown}");
        }
        assert!(!answer.contains("internal_error"), "input {number} to {path}: {answer}\n{shown}");
    }
}

/// Returns a valid request to each route.
fn requests() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"]});
    let function = json!({"name": "weather", "description": "now", "parameters": parameters});
    vec![
        (
            "/v1/completions",
            json!({"prompt": ["Once", "upon"], "max_tokens": 4, "n": 2, "best_of": 3, "echo": true, "logprobs": 2,
            "stop": ["\n", "end"], "logit_bias": {"5": -1.5}, "temperature": 0.5, "top_p": 0.9, "seed": 7}),
        ),
        (
            "/v1/completions",
            json!({"prompt": [1, 2, 3], "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true},
            "regex": "[a-z]{1,8}", "min_tokens": 1, "ignore_eos": true, "return_token_ids": true}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_completion_tokens": 4, "logprobs": true, "top_logprobs": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": parameters}}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 4, "stream": true, "tool_choice": "auto",
            "tools": [{"type": "function", "function": function}], "parallel_tool_calls": true}),
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be kind.", "max_output_tokens": 4, "store": false, "text": {"format": {"type": "text"}}}),
        ),
        (
            "/v1/messages",
            json!({"model": "any", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4,
            "system": [{"type": "text", "text": "Be kind."}], "stop_sequences": ["end"], "top_k": 5}),
        ),
        ("/v1/messages/count_tokens", json!({"model": "any", "messages": [{"role": "user", "content": "Hi"}]})),
        (
            "/completion",
            json!({"prompt": ["Once", 5, "upon"], "n_predict": 4, "n_probs": 2, "cache_prompt": true, "mirostat": 0,
            "repeat_penalty": 1.1, "logit_bias": [[5, false]], "json_schema": parameters}),
        ),
        ("/tokenize", json!({"content": "Once upon", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [1, 2, 3]})),
    ]
}
