//! Sends every example in the description, and whatever else an operation needs to succeed, and checks every response.

use std::collections::BTreeSet;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

use super::schema::complaints;

/// A response with its whole body.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
}

pub(crate) async fn send(state: &AppState, method: &str, path: &str, body: Option<&Value>) -> Answer {
    let kind = "application/json";
    match body {
        Some(body) => send_bytes(state, method, path, kind, body.to_string().into()).await,
        None => send_bytes(state, method, path, "", Bytes::new()).await,
    }
}

async fn send_bytes(state: &AppState, method: &str, path: &str, kind: &str, body: Bytes) -> Answer {
    let mut request = Request::builder().method(method.to_uppercase().as_str()).uri(path);
    if !kind.is_empty() {
        request = request.header(header::CONTENT_TYPE, kind);
    }
    let response = crate::common::send(state, request.body(Body::from(body)).unwrap()).await;
    let (parts, body) = response.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
    Answer { status: parts.status, headers: parts.headers, body }
}

pub(crate) async fn document(state: &AppState) -> Value {
    send(state, "get", "/openapi.json", None).await.json()
}

/// Checks that the status, headers, media type and body of a response are as described.
pub(crate) fn check(document: &Value, method: &str, path: &str, answer: &Answer) {
    let operation = &document["paths"][path][method];
    let described = &operation["responses"][answer.status.as_str()];
    assert!(described.is_object(), "{method} {path}: {} is not described: {}", answer.status, answer.text());
    for (name, _) in described["headers"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| !["x-stream-id", "x-ignored-fields"].contains(&name.as_str()))
        // Only turns of sessions have these headers.
        .filter(|(name, _)| !(path.contains("completion") && ["etag", "x-session-version"].contains(&name.as_str())))
    {
        assert!(!answer.header(name).is_empty(), "{method} {path}: no header {name}");
    }
    let kind = answer.header("content-type");
    if described["content"].is_null() {
        assert!(answer.body.is_empty());
        return;
    }
    let content = &described["content"][kind];
    assert!(content.is_object(), "{method} {path}: {kind} is not described");
    let schema = &content["schema"];
    let found = match kind {
        "application/json" => complaints(document, schema, &answer.json()),
        "text/event-stream" => stream_complaints(document, schema, path, &answer.text()),
        _ => Vec::new(),
    };
    assert!(found.is_empty(), "{method} {path}: {found:#?} in {}", answer.text());
}

/// Returns the differences between the data of a stream's events and their description.
fn stream_complaints(document: &Value, schema: &Value, path: &str, stream: &str) -> Vec<String> {
    let mut data: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    if (path.ends_with("/completions") && path != "/completions") || path == "/v1/streams/{id}" {
        assert_eq!(data.pop(), Some("[DONE]"), "{stream}");
    }
    assert!(data.len() > 1, "{stream}");
    // The first option describes the events; the last event may match the second instead.
    let option = |at: usize| &schema["properties"]["data"]["anyOf"][at]["contentSchema"];
    let last = data.pop().map(|data| serde_json::from_str(data).unwrap()).unwrap();
    let events = data.iter().flat_map(|data| complaints(document, option(0), &serde_json::from_str(data).unwrap()));
    let mut found: Vec<String> = events.collect();
    let of_last = complaints(document, option(0), &last);
    if !of_last.is_empty() && !complaints(document, option(1), &last).is_empty() {
        found.extend(of_last);
    }
    found
}

async fn session(state: &AppState) -> Value {
    send(state, "post", "/v1/sessions", Some(&json!({"text": "Once upon a time there was"}))).await.json()
}

/// Fills in the placeholders in a path, and creates what they refer to.
pub(crate) async fn filled(state: &AppState, path: &str) -> String {
    let id = if path.starts_with("/v1/sessions/{id}") {
        session(state).await["id"].clone()
    } else if path.starts_with("/v1/responses/{id}") {
        let asked = json!({"input": "Tell me of a fox.", "max_output_tokens": 2});
        send(state, "post", "/v1/responses", Some(&asked)).await.json()["id"].clone()
    } else if path.starts_with("/v1/streams/{id}") {
        let id = session(state).await["id"].clone();
        let turn = json!({"session": id, "prompt": " a fox", "stream": true, "on_disconnect": "continue"});
        send(state, "post", "/v1/completions", Some(&turn)).await.header("x-stream-id").into()
    } else if path.starts_with("/slots/{id_slot}") {
        let asked = json!({"prompt": "Tell me of a fox.", "n_predict": 2, "id_slot": 1});
        send(state, "post", "/completion", Some(&asked)).await;
        return path.replace("{id_slot}", if path.ends_with("state") { "1" } else { "1?action=save" });
    } else {
        "tidegate-tiny".into()
    };
    let file = if path.starts_with("/docs") { "docs.js" } else { "app.js" };
    let path = path.replace("{id}", id.as_str().unwrap()).replace("{file}", file);
    if path.contains("{name}") || path.contains("{version}") {
        let tag = format!("/v1/sessions/{}/tags/best", id.as_str().unwrap());
        assert_eq!(send(state, "put", &tag, None).await.status, StatusCode::OK);
    }
    let path = if path.ends_with("/diff") { format!("{path}?from={}", id.as_str().unwrap()) } else { path };
    path.replace("{name}", "best").replace("{version}", "best")
}

/// Returns the path, method and content of every operation with a JSON body.
pub(crate) fn bodies(document: &Value) -> impl Iterator<Item = (&str, &str, &Value)> {
    let items = document["paths"].as_object().unwrap().iter();
    let operations = items.flat_map(|(path, item)| item.as_object().unwrap().iter().map(move |found| (path, found)));
    operations.filter_map(|(path, (method, operation))| {
        let content = &operation["requestBody"]["content"]["application/json"];
        content.is_object().then_some((path.as_str(), method.as_str(), content))
    })
}

/// Sends every example of every operation and checks the responses. Returns the operations.
pub(crate) async fn all(state: &AppState) -> BTreeSet<String> {
    let document = document(state).await;
    let mut tried = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            for answer in answers(&document, state, method, path, operation).await {
                check(&document, method, path, &answer);
                let absent = path.contains("embedding") || path == "/infill";
                let expected = if absent { 501..502 } else { 200..300 };
                assert!(expected.contains(&answer.status.as_u16()), "{method} {path}: {}", answer.text());
                tried.insert(format!("{method} {path}"));
            }
        }
    }
    tried
}

async fn answers(document: &Value, state: &AppState, method: &str, path: &str, operation: &Value) -> Vec<Answer> {
    match path {
        "/v1/sessions/{id}/rewind" => {
            let id = session(state).await["id"].clone();
            let path = format!("/v1/sessions/{}/append", id.as_str().unwrap());
            let parent = send(state, "post", &path, Some(&json!({"text": " a fox"}))).await.json()["parent"].clone();
            let path = format!("/v1/sessions/{}/rewind", id.as_str().unwrap());
            return vec![send(state, method, &path, Some(&json!({"version": parent}))).await];
        }
        "/v1/snapshots" => {
            let path = filled(state, "/v1/sessions/{id}/snapshot").await;
            let snapshot = send(state, "get", &path, None).await.body;
            return vec![send_bytes(state, method, "/v1/snapshots", "application/octet-stream", snapshot).await];
        }
        "/slots/{id_slot}/state" if method == "put" => {
            let path = filled(state, path).await;
            let snapshot = send(state, "get", &path, None).await.body;
            return vec![send_bytes(state, method, &path, "application/octet-stream", snapshot).await];
        }
        _ => {}
    }
    let content = &operation["requestBody"]["content"]["application/json"];
    let mut answers = Vec::new();
    for (name, example) in content["examples"].as_object().into_iter().flatten() {
        let body = &example["value"];
        let found = complaints(document, &content["schema"], body);
        assert!(found.is_empty(), "{method} {path}: the example {name:?} is not as described: {found:#?}");
        answers.push(send(state, method, &filled(state, path).await, Some(body)).await);
    }
    if operation["requestBody"].is_null() {
        answers.push(send(state, method, &filled(state, path).await, None).await);
    }
    answers
}
