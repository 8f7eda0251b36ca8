//! Schemas without `additionalProperties`: on every route the model adds no other keys, unless the request allows them.

use crate::common::parrot::parrot;
use crate::common::{send, text, with};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

/// Returns a model that generates `wanted` unless a grammar forbids it.
fn model(wanted: &str) -> AppState {
    let folder = tempfile::tempdir().unwrap();
    parrot(wanted, "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", folder.path())
}

async fn said(state: &AppState, path: &str, body: &Value, at: &str) -> String {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
    let (status, answer) = (response.status(), text(response).await);
    assert_eq!(status, StatusCode::OK, "{path} {body}: {answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let said = answer.pointer(at).unwrap_or_else(|| panic!("no {at} in {answer}"));
    said.as_str().map_or_else(|| said.to_string(), str::to_owned)
}

/// Returns a schema with a nested object, as Pydantic writes it.
fn schema() -> Value {
    json!({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/A"}},
        "$defs": {"A": {"type": "object", "required": ["b"], "properties": {"b": {"type": "boolean"}}}}})
}

const WANTED: &str = r#"{"a": {"b": true, "c": 1}, "d": 2}"#;
const ALLOWED: &str = r#"{"a": {"b": true}}"#;

fn chat(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "u"}], "max_tokens": 200, "temperature": 0}), more)
}

fn format(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}})
}

fn tools(schema: &Value) -> Value {
    json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"})
}

const SWITCHED: [Option<bool>; 3] = [None, Some(true), Some(false)];

/// Returns `body` with the switch, and what the model then says.
fn switched(mut body: Value, disabled: Option<bool>) -> (Value, &'static str) {
    if let Some(disabled) = disabled {
        body["structured_outputs"] = json!({"disable_additional_properties": disabled});
    }
    (body, if disabled == Some(false) { WANTED } else { ALLOWED })
}

#[tokio::test]
async fn a_format_has_the_keys_of_its_schema_unless_switched() {
    let state = model(WANTED);
    let prompt = json!({"prompt": "p", "max_tokens": 200, "temperature": 0});
    let input = json!({"input": "i", "max_output_tokens": 200, "temperature": 0, "store": false,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema()}}});
    for disabled in SWITCHED {
        for (path, body, at) in [
            ("/v1/chat/completions", chat(format(&schema())), "/choices/0/message/content"),
            ("/v1/completions", with(prompt.clone(), format(&schema())), "/choices/0/text"),
            ("/v1/completions", with(prompt.clone(), json!({"json_schema": schema()})), "/choices/0/text"),
            ("/v1/completions", with(prompt.clone(), json!({"guided_json": schema()})), "/choices/0/text"),
            ("/v1/responses", input.clone(), "/output/0/content/0/text"),
        ] {
            let (body, expected) = switched(body, disabled);
            assert_eq!(said(&state, path, &body, at).await, expected, "{path} {body}");
        }
        let mut body = with(prompt.clone(), json!({"structured_outputs": {"json": schema()}}));
        let expected = disabled.map_or(ALLOWED, |disabled| {
            body["structured_outputs"]["disable_additional_properties"] = disabled.into();
            if disabled { ALLOWED } else { WANTED }
        });
        assert_eq!(said(&state, "/v1/completions", &body, "/choices/0/text").await, expected);
    }
    let null = json!({"structured_outputs": {"disable_additional_properties": null}});
    let body = with(with(prompt, json!({"json_schema": schema()})), null);
    assert_eq!(said(&state, "/v1/completions", &body, "/choices/0/text").await, ALLOWED);
    let llama = json!({"prompt": "p", "n_predict": 200, "temperature": 0, "json_schema": schema()});
    assert_eq!(said(&state, "/completion", &llama, "/content").await, ALLOWED);
}

#[tokio::test]
async fn a_call_has_the_arguments_of_its_schema_unless_switched() {
    let state = model(&format!(r#"{{"name": "f", "arguments": {WANTED}}}"#));
    for disabled in SWITCHED {
        let (body, expected) = switched(chat(tools(&schema())), disabled);
        let at = "/choices/0/message/tool_calls/0/function/arguments";
        assert_eq!(said(&state, "/v1/chat/completions", &body, at).await, expected, "{body}");
    }
    let tool = json!({"name": "f", "input_schema": schema()});
    let body = chat(json!({"model": "fake", "tools": [tool], "tool_choice": {"type": "any"}}));
    let input = said(&state, "/v1/messages", &body, "/content/0/input").await;
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), json!({"a": {"b": true}}));
}

#[tokio::test]
async fn additional_properties_that_a_schema_allows_are_allowed() {
    let mut open = schema();
    open["additionalProperties"] = true.into();
    open["$defs"]["A"]["additionalProperties"] = json!({"type": "integer"});
    let at = "/choices/0/message/content";
    assert_eq!(said(&model(WANTED), "/v1/chat/completions", &chat(format(&open)), at).await, WANTED);
}
