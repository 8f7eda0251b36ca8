//! Reasoning, which models write before their answers, in chat: whole and streamed, with tools, and cut off.

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

use crate::common::parrot::parrot;
use crate::common::{events, send, text, with};

/// A template of a model that reasons.
const TEMPLATE: &str = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}{{ opening }}";

async fn post(state: &AppState, more: Value) -> String {
    let body = with(json!({"messages": [{"role": "user", "content": "u"}]}), more);
    let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    text(send(state, request.body(Body::from(body.to_string())).unwrap()).await).await
}

/// The reasoning and the content of an answer: whole, and the same from a stream.
async fn parts(state: &AppState, more: Value) -> [Value; 2] {
    let whole: Value = serde_json::from_str(&post(state, more.clone()).await).unwrap();
    let message = &whole["choices"][0]["message"];
    let stream = post(state, with(more, json!({"stream": true}))).await;
    let chunks = events(&stream).into_iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let deltas: Vec<Value> = chunks.map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    for key in ["reasoning_content", "content"] {
        let streamed: String = deltas.iter().filter_map(|delta| delta[key].as_str()).collect();
        assert_eq!(streamed, message[key].as_str().unwrap_or_default(), "{key}: {stream}");
    }
    ["reasoning_content", "content"].map(|key| message[key].clone())
}

#[tokio::test]
async fn reasoning_is_apart_from_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("<think>\nIs it? \n</think>\n\nYes.", TEMPLATE, folder.path());
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for more in [json!({}), json!({"logprobs": true}), json!({"return_token_ids": true}), json!({"tools": [tool]})] {
        assert_eq!(parts(&state, more.clone()).await, [json!("Is it?"), json!("Yes.")], "{more}");
    }
    assert_eq!(parts(&state, json!({"stop": ["it?"]})).await, [json!("Is"), json!("")]);
    let opened = json!({"chat_template_kwargs": {"opening": "<think>\n"}, "stop": ["it?"]});
    assert_eq!(parts(&state, opened).await[0], "<think>\nIs", "it is open already");
}

#[tokio::test]
async fn reasoning_that_the_prompt_opens_ends_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("Is it?</think>Yes.", TEMPLATE, folder.path());
    let opened = json!({"chat_template_kwargs": {"opening": "<think>\n"}});
    assert_eq!(parts(&state, opened).await, [json!("Is it?"), json!("Yes.")]);
    assert_eq!(parts(&state, json!({})).await, [Value::Null, json!("Is it?</think>Yes.")]);
}

#[tokio::test]
async fn a_model_whose_template_knows_no_reasoning_has_one_text() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("<think>No.</think>Yes.", "{{ messages[0].content }}", folder.path());
    assert_eq!(parts(&state, json!({})).await, [Value::Null, json!("<think>No.</think>Yes.")]);
}
