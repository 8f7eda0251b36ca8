//! Requests to the responses API, and readers of its answers.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::sessions::App;
use super::with;

/// The path of the responses API.
pub(crate) const PATH: &str = "/v1/responses";

/// Builds a request body. Sampling is greedy, so that the text is the same however it is requested.
pub(crate) fn asking(input: impl Into<Value>, more: Value) -> Value {
    with(json!({"input": input.into(), "max_output_tokens": 12, "temperature": 0}), more)
}

pub(crate) async fn respond(app: &App, body: Value) -> Value {
    let answer = app.post(PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

pub(crate) fn said(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

pub(crate) fn path(response: &Value) -> String {
    format!("{PATH}/{}", response["id"].as_str().unwrap())
}

/// Returns the events of a stream. Checks that each one states its name twice, and that they are numbered from 0.
pub(crate) fn events(text: &str) -> Vec<Value> {
    let blocks: Vec<&str> = text.split_terminator("\n\n").collect();
    let event = |(number, block): (usize, &&str)| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        assert_eq!(event["sequence_number"], number);
        event
    };
    blocks.iter().enumerate().map(event).collect()
}

pub(crate) fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    names
}
