//! Every way in which a request is refused, and the parameter that the error names.

use crate::common::fake::Fake;
use crate::common::{completion, get, post, scripted, send, shipped, text};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};

/// Posts a raw body and returns the status, `param` and the whole error.
async fn refuse(body: &str) -> (StatusCode, Option<String>, Value) {
    let response = send(&shipped(), completion(body.to_owned())).await;
    let status = response.status();
    let answer: Value = serde_json::from_str(&text(response).await).unwrap();
    let error = answer["error"].clone();
    for field in ["message", "type", "param", "code"] {
        assert!(error.as_object().is_some_and(|error| error.contains_key(field)), "no {field} in {answer} for {body}");
    }
    (status, error["param"].as_str().map(str::to_owned), error)
}

#[expect(clippy::too_many_lines, reason = "a table")]
#[tokio::test]
async fn invalid_values_are_named() {
    let table = [
        ("prompt", json!({})),
        ("prompt", json!({"prompt": null})),
        ("prompt", json!({"prompt": 1})),
        ("prompt", json!({"prompt": {"text": "x"}})),
        ("prompt", json!({"prompt": []})),
        ("prompt", json!({"prompt": [[]]})),
        ("prompt", json!({"prompt": [["x"]]})),
        ("prompt", json!({"prompt": ["x", 1]})),
        ("prompt", json!({"prompt": [-1]})),
        ("prompt", json!({"prompt": [4096]})),
        ("prompt", json!({"prompt": [4_294_967_296_u64]})),
        ("prompt", json!({"prompt": [1.5]})),
        ("prompt", json!({"prompt": vec!["x"; 257]})),
        ("max_tokens", json!({"max_tokens": 0})),
        ("max_tokens", json!({"max_tokens": -1})),
        ("max_tokens", json!({"max_tokens": 1_000_001})),
        ("max_tokens", json!({"max_tokens": u64::MAX})),
        ("max_tokens", json!({"max_tokens": 1.5})),
        ("max_tokens", json!({"max_tokens": "16"})),
        ("temperature", json!({"temperature": -0.1})),
        ("temperature", json!({"temperature": 2.1})),
        ("temperature", json!({"temperature": 1e300})),
        ("temperature", json!({"temperature": "NaN"})),
        ("temperature", json!({"temperature": [1]})),
        ("top_p", json!({"top_p": 0})),
        ("top_p", json!({"top_p": 1.1})),
        ("top_p", json!({"top_p": -1})),
        ("top_k", json!({"top_k": -2})),
        ("top_k", json!({"top_k": i64::MIN})),
        ("top_k", json!({"top_k": 0.5})),
        ("min_p", json!({"min_p": -0.1})),
        ("min_p", json!({"min_p": 1.1})),
        ("typical_p", json!({"typical_p": 0})),
        ("typical_p", json!({"typical_p": 2})),
        ("repetition_penalty", json!({"repetition_penalty": 0})),
        ("repetition_penalty", json!({"repetition_penalty": -1})),
        ("repetition_penalty", json!({"repetition_penalty": 1e300})),
        ("frequency_penalty", json!({"frequency_penalty": 2.5})),
        ("presence_penalty", json!({"presence_penalty": -2.5})),
        ("logit_bias", json!({"logit_bias": {"x": 1}})),
        ("logit_bias", json!({"logit_bias": {"-1": 1}})),
        ("logit_bias", json!({"logit_bias": {"07": 1}})),
        ("logit_bias", json!({"logit_bias": {"+7": 1}})),
        ("logit_bias", json!({"logit_bias": {"4096": 1}})),
        ("logit_bias", json!({"logit_bias": {"1": 101}})),
        ("logit_bias", json!({"logit_bias": {"1": "a"}})),
        ("logit_bias", json!({"logit_bias": [1]})),
        ("seed", json!({"seed": 0.5})),
        ("seed", json!({"seed": "x"})),
        ("stop", json!({"stop": ""})),
        ("stop", json!({"stop": ["a", ""]})),
        ("stop", json!({"stop": vec!["x"; 17]})),
        ("stop", json!({"stop": "x".repeat(1025)})),
        ("stop", json!({"stop": 1})),
        ("stop", json!({"stop": [1]})),
        ("stream", json!({"stream": "yes"})),
        ("stream_options", json!({"stream_options": {"include_usage": true}})),
        ("stream_options", json!({"stream": false, "stream_options": {}})),
        ("stream_options", json!({"stream": true, "stream_options": {"include_usage": 1}})),
        ("ignore_eos", json!({"ignore_eos": 1})),
        ("return_token_ids", json!({"return_token_ids": "x"})),
        ("model", json!({"model": 5})),
        ("n", json!({"n": 0})),
        ("n", json!({"n": 129})),
        ("n", json!({"n": "1"})),
        ("n", json!({"n": 2, "prompt": vec!["x"; 129]})),
        ("best_of", json!({"best_of": 0})),
        ("best_of", json!({"best_of": 129})),
        ("best_of", json!({"best_of": 2, "n": 3})),
        ("best_of", json!({"best_of": 2, "stream": true})),
        ("max_tokens", json!({"n": 100, "max_tokens": 100_000})),
        ("max_tokens", json!({"logprobs": 20, "max_tokens": 100_000})),
        ("echo", json!({"echo": 1})),
        ("suffix", json!({"suffix": "end"})),
        ("logprobs", json!({"logprobs": -1})),
        ("logprobs", json!({"logprobs": 21})),
        ("logprobs", json!({"logprobs": true})),
        ("top_logprobs", json!({"logprobs": 1, "top_logprobs": 1})),
        ("stop_token_ids", json!({"stop_token_ids": [4096]})),
        ("stop_token_ids", json!({"stop_token_ids": [-1]})),
        ("stop_token_ids", json!({"stop_token_ids": 1})),
        ("add_special_tokens", json!({"add_special_tokens": 1})),
        ("response_format", json!({"response_format": {"type": "xml"}})),
        ("min_tokens", json!({"min_tokens": 17})),
        ("min_tokens", json!({"min_tokens": -1})),
        ("modalities", json!({"modalities": ["text", "audio"]})),
        ("web_search_options", json!({"web_search_options": {}})),
        ("length_penalty", json!({"length_penalty": 1.1})),
        ("early_stopping", json!({"early_stopping": true})),
        ("return_tokens_as_token_ids", json!({"return_tokens_as_token_ids": 1})),
        ("guided_decoding_backend", json!({"guided_decoding_backend": "xgrammar"})),
        ("spaces_between_special_tokens", json!({"spaces_between_special_tokens": false})),
        ("detokenize", json!({"detokenize": false})),
        ("logits_processors", json!({"logits_processors": ["x"]})),
        ("stream_options", json!({"stream": true, "stream_options": {"continuous_usage_stats": 1}})),
    ];
    for (param, change) in table {
        let mut body = change.clone();
        if param != "prompt" && body.get("prompt").is_none() {
            body["prompt"] = "x".into();
        }
        let (status, named, error) = refuse(&body.to_string()).await;
        assert_eq!((status, named.as_deref()), (StatusCode::BAD_REQUEST, Some(param)), "{change}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(param), "{change}: {error}");
    }
}

#[tokio::test]
async fn numbers_beyond_the_range_of_floats_are_named() {
    for (param, body) in [
        ("temperature", r#"{"prompt": "x", "temperature": 1e999}"#),
        ("max_tokens", r#"{"prompt": "x", "max_tokens": 99999999999999999999999999}"#),
        ("seed", r#"{"prompt": "x", "seed": 18446744073709551616}"#),
        ("seed", r#"{"prompt": "x", "seed": -9223372036854775809}"#),
    ] {
        let (status, named, error) = refuse(body).await;
        assert_eq!((status, named.as_deref()), (StatusCode::BAD_REQUEST, Some(param)), "{error}");
    }
}

#[tokio::test]
async fn default_values_of_unsupported_fields_are_accepted() {
    let body = json!({"prompt": "x", "max_tokens": 1, "n": 1, "best_of": 1, "echo": false, "suffix": null,
        "logprobs": null, "user": "u", "top_k": -1, "stop": null, "logit_bias": {}, "stream_options": null,
        "response_format": {"type": "text"}, "metadata": {"my": "own"}, "length_penalty": 1, "detokenize": true});
    let (status, answer) = post(&shipped(), body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
}

#[tokio::test]
async fn a_body_that_is_not_a_json_object_is_refused() {
    assert_eq!(refuse(" ").await.2["message"], "the body is empty; it must be a JSON object");
    for body in ["", "{", "[]", "null", "\"x\"", "{\"prompt\": \"x\"} more", "{\"prompt\": NaN}", "\u{feff}{}"] {
        let (status, _, error) = refuse(body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {error}");
    }
    let deep = format!("{{\"prompt\": {}", "[".repeat(100_000));
    assert_eq!(refuse(&deep).await.0, StatusCode::BAD_REQUEST);
    let not_utf8 = send(&shipped(), completion(b"{\"prompt\": \"\xff\"}".to_vec())).await;
    assert_eq!(not_utf8.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn another_models_name_is_not_found() {
    let (status, param, error) = refuse(r#"{"prompt": "x", "model": "gpt-4"}"#).await;
    assert_eq!((status, param.as_deref()), (StatusCode::NOT_FOUND, Some("model")));
    assert_eq!(error["code"], "model_not_found");
}

#[tokio::test]
async fn the_content_type_must_be_json() {
    for kind in [None, Some("application/x-www-form-urlencoded"), Some("text/plain"), Some("application/jsonp")] {
        let mut request = completion(r#"{"prompt": "x"}"#);
        request.headers_mut().remove(header::CONTENT_TYPE);
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, kind.parse().unwrap());
        }
        let response = send(&shipped(), request).await;
        assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
        assert!(text(response).await.contains("application/json"));
    }
    let mut packed = completion(r#"{"prompt": "x"}"#);
    packed.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    let response = send(&shipped(), packed).await;
    assert_eq!(response.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(text(response).await.contains("content-encoding gzip is not supported"));
    let mut request = completion(r#"{"prompt": "x", "max_tokens": 1}"#);
    request.headers_mut().insert(header::CONTENT_TYPE, "Application/JSON; charset=utf-8".parse().unwrap());
    assert_eq!(send(&shipped(), request).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_long_body_is_refused() {
    let (state, ..) = scripted(Fake::new(1), 1);
    let response = send(&state, completion(json!({"prompt": "x".repeat(10_001)}).to_string())).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("10000 bytes"), "{error}");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_in_the_same_shape() {
    let state = shipped();
    let response = send(&state, get("/chat/completion")).await;
    assert!(text(response).await.contains("no route matches /chat/completion; the nearest is /chat/completions"));
    let response = send(&state, get("/v1/nothing")).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert!(text(response).await.contains(r#""code":"not_found""#));
    let response = send(&state, get("/v1/models/%ff")).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert!(text(response).await.contains(r#""param":"model""#));
    let response = send(&state, get("/v1/completions")).await;
    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(response.headers()[header::ALLOW], "POST");
    let error: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!(error["error"]["code"], "method_not_allowed");
    assert_eq!(error["error"]["message"], "GET is not allowed here; this path takes POST");
    for (path, methods) in [("/v1/models", "GET, HEAD"), ("/props", "GET, HEAD"), ("/v1/messages", "POST")] {
        let response = send(&state, Request::delete(path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        let answer = text(response).await;
        assert!(answer.contains(&format!("DELETE is not allowed here; this path takes {methods}")), "{answer}");
    }
}
