//! Helpers that send requests to either route and read the answers.

use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

use crate::common::{events, send, text, with};

/// OpenAI's two routes.
pub(crate) const ROUTES: [&str; 2] = ["/v1/completions", "/v1/chat/completions"];

/// Returns a POST request with a JSON body to any path.
pub(crate) fn posting(path: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::builder().method(Method::POST).uri(path).header(header::CONTENT_TYPE, "application/json");
    request.body(body.into()).unwrap()
}

/// Posts a raw body and reads a JSON answer.
pub(crate) async fn raw(state: &AppState, path: &str, body: String) -> (StatusCode, Value) {
    let response = send(state, posting(path, body)).await;
    let status = response.status();
    let text = text(response).await;
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("no JSON: {text}")))
}

pub(crate) async fn chat(state: &AppState, body: Value) -> (StatusCode, Value) {
    raw(state, ROUTES[1], body.to_string()).await
}

/// Returns the chunks of a stream, which must end correctly.
pub(crate) async fn chunks(state: &AppState, path: &str, body: Value) -> Vec<Value> {
    let response = send(state, posting(path, with(body, json!({"stream": true})).to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    let stream = text(response).await;
    let mut data = events(&stream);
    assert_eq!(data.pop(), Some("[DONE]"));
    data.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// Returns the names in an object, sorted.
pub(crate) fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

/// Combines the choices of a stream into the form of a whole answer.
pub(crate) fn joined(chunks: &[Value]) -> Vec<Value> {
    let mut whole: Vec<Value> = Vec::new();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        while whole.len() <= index {
            whole.push(json!({"index": whole.len(), "text": "", "logprobs": null, "finish_reason": null}));
        }
        let target = &mut whole[index];
        assert!(target["finish_reason"].is_null(), "a chunk follows the end: {choice}");
        let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        target["text"] = format!("{}{text}", target["text"].as_str().unwrap()).into();
        target["finish_reason"] = choice["finish_reason"].clone();
        if let Some(stop) = choice.get("stop_reason") {
            target["stop_reason"] = stop.clone();
        }
        for (name, list) in choice["logprobs"].as_object().into_iter().flatten() {
            let Some(list) = list.as_array() else { continue };
            if target["logprobs"][name].is_null() {
                target["logprobs"][name] = json!([]);
            }
            target["logprobs"][name].as_array_mut().unwrap().extend_from_slice(list);
        }
    }
    whole
}
