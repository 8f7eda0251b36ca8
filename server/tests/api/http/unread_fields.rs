//! Fields that a route does not read: on every route they are refused by name if they would change the answer, and
//! otherwise ignored and listed.

use crate::common::{send, shipped, text, with};
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use serde_json::{Value, json};

async fn ask(path: &str, body: &Value) -> Response<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    send(&shipped(), request.body(Body::from(body.to_string())).unwrap()).await
}

/// Returns every route that generates text, with a body.
fn routes() -> [(&'static str, Value); 5] {
    let messages = json!([{"role": "user", "content": "x"}]);
    [
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 1})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": 1, "store": false})),
        ("/v1/messages", json!({"model": "tidegate-tiny", "messages": messages, "max_tokens": 1})),
        ("/completion", json!({"prompt": "x", "n_predict": 1})),
    ]
}

#[tokio::test]
async fn a_parameter_of_any_server_that_a_route_does_not_read_is_refused_by_name() {
    for (path, body) in routes() {
        for (name, value, there) in [
            ("n_predict", json!(5), Some("/completion")),
            ("repeat_penalty", json!(1.2), Some("/completion")),
            ("n_probs", json!(3), Some("/completion")),
            ("repeat_last_n", json!(64), Some("/completion")),
            ("samplers", json!(["top_k"]), None),
            ("mirostat", json!(2), None),
            ("dry_multiplier", json!(0.8), None),
            ("xtc_probability", json!(0.5), None),
            ("dynatemp_range", json!(0.5), None),
            ("id_slot", json!(0), Some("/completion")),
            ("lora", json!([{"id": 0, "scale": 1}]), None),
            ("thinking", json!({"type": "enabled", "budget_tokens": 1024}), None),
            ("bad_words", json!(["x"]), None),
            ("suffix", json!("x"), None),
        ] {
            if there == Some(path) {
                continue;
            }
            let response = ask(path, &with(body.clone(), json!({name: value}))).await;
            let (status, answer) = (response.status(), text(response).await);
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {name}: {answer}");
            let error = serde_json::from_str::<Value>(&answer).unwrap()["error"].clone();
            assert!(error["param"] == name && error["message"].as_str().unwrap().contains(name), "{path}: {answer}");
        }
    }
}

#[tokio::test]
async fn the_error_names_what_the_route_reads_instead() {
    for (path, name, value, here) in [
        ("/v1/chat/completions", "n_predict", json!(5), "max_tokens"),
        ("/v1/chat/completions", "repeat_penalty", json!(1.2), "repetition_penalty"),
        ("/v1/chat/completions", "prompt", json!("x"), "messages"),
        ("/v1/completions", "max_output_tokens", json!(5), "max_tokens"),
        ("/v1/responses", "max_tokens", json!(5), "max_output_tokens"),
        ("/v1/messages", "stop", json!("x"), "stop_sequences"),
        ("/completion", "repetition_penalty", json!(1.2), "repeat_penalty"),
        ("/completion", "logprobs", json!(3), "n_probs"),
    ] {
        let (_, body) = routes().into_iter().find(|(route, _)| *route == path).unwrap();
        let answer = text(ask(path, &with(body, json!({name: value}))).await).await;
        assert!(answer.contains(&format!("{name} must be absent: it is {here} here")), "{path}: {answer}");
    }
}

#[tokio::test]
async fn unknown_fields_are_ignored_and_listed() {
    let neutral = json!({"repeat_penalty": 1, "mirostat": 0, "samplers": null, "nothing": null});
    let unknown = json!({"user_id": "u", "a,b\n": [1], "cache_prompt": true});
    let messages = json!([{"role": "user", "content": "x"}]);
    let others = [
        ("/tokenize", json!({"prompt": "x"})),
        ("/detokenize", json!({"tokens": [5]})),
        ("/apply-template", json!({"messages": messages})),
        ("/v1/messages/count_tokens", json!({"model": "tidegate-tiny", "messages": messages})),
    ];
    for (path, body) in routes().into_iter().chain(others) {
        for stream in [false, true] {
            let streams =
                if path.contains("token") || path == "/apply-template" { json!({}) } else { json!({"stream": stream}) };
            let body = with(with(body.clone(), streams), neutral.clone());
            let plain = ask(path, &body).await;
            assert_eq!(plain.status(), StatusCode::OK, "{path}");
            if !path.contains("tokenize") && path != "/apply-template" {
                assert!(!plain.headers().contains_key("x-ignored-fields"), "{path}: {:?}", plain.headers());
            }
            let more = ask(path, &with(body, unknown.clone())).await;
            assert_eq!(more.status(), StatusCode::OK, "{path}");
            let listed = more.headers()["x-ignored-fields"].to_str().unwrap();
            for name in ["a?b?", "cache_prompt", "user_id"] {
                assert!(listed.split(", ").any(|listed| listed == name), "{path}: {listed}");
            }
        }
    }
}
