//! Holds `/openapi.json` to the server: every route is described, and answers every example as described.

mod schema;
mod sources;
mod walk;

use crate::common::sessions::app;
use axum::http::StatusCode;
use serde_json::{Value, json};

#[tokio::test]
async fn what_is_read_is_described_and_what_is_described_is_read() {
    let document = walk::document(&app().await.state).await;
    let described = |names: &[&str]| {
        let schemas = names.iter().filter_map(|name| document["components"]["schemas"][name]["properties"].as_object());
        let mut fields: Vec<String> = schemas.flatten().map(|(field, _)| field.clone()).collect();
        fields.sort();
        fields.dedup();
        fields
    };
    for (file, read, names) in [
        ("formats/completions/wire.rs", "CompletionRequest", &["CompletionRequest"][..]),
        ("formats/chat/wire.rs", "ChatRequest", &["ChatRequest"]),
        ("formats/openai/wire.rs", "StreamOptions", &["StreamOptions"]),
        ("formats/responses/wire.rs", "ResponseRequest", &["ResponseRequest"]),
        ("formats/responses/wire.rs", "StreamOptions", &["ResponseStreamOptions"]),
        ("formats/responses/wire.rs", "TextConfig", &["TextConfig"]),
        ("formats/anthropic/wire.rs", "MessagesRequest", &["MessagesRequest"]),
        ("formats/llamacpp/wire.rs", "LlamaRequest", &["LlamaRequest"]),
        ("formats/tokens.rs", "TokenizeRequest", &["TokenizeRequest"]),
        ("formats/tokens.rs", "DetokenizeRequest", &["DetokenizeRequest"]),
        ("formats/tokens.rs", "TemplateRequest", &["TemplateRequest"]),
    ] {
        let mut fields = sources::fields(file, read);
        if ["CompletionRequest", "ChatRequest"].contains(&read) {
            fields.extend(sources::fields("formats/openai/fields.rs", "$name"));
        }
        fields.sort();
        assert_eq!(described(names), fields, "{names:?} and {read} in {file}");
    }
}

#[tokio::test]
async fn every_example_is_answered_as_described() {
    let app = app().await;
    let tried = walk::all(&app.state).await;
    for (path, _) in tidegate_server::api::paths() {
        let path = path.replace("{*", "{");
        assert!(tried.iter().any(|operation| operation.ends_with(&format!(" {path}"))), "{path} is not described");
    }
}

#[tokio::test]
async fn refusals_are_as_described() {
    let app = app().await;
    let document = walk::document(&app.state).await;
    for (path, body, status) in [
        ("/v1/completions", json!({"prompt": "x", "temperature": 9}), StatusCode::BAD_REQUEST),
        ("/v1/completions", json!({"prompt": "x", "model": "other"}), StatusCode::NOT_FOUND),
        ("/v1/completions", json!({"prompt": "x", "return_state": true}), StatusCode::NOT_IMPLEMENTED),
        ("/v1/chat/completions", json!([]), StatusCode::BAD_REQUEST),
        ("/v1/responses", json!({}), StatusCode::BAD_REQUEST),
        ("/v1/sessions", json!({"text": "x", "tokens": [1]}), StatusCode::BAD_REQUEST),
    ] {
        let answer = walk::send(&app.state, "post", path, Some(&body)).await;
        assert_eq!(answer.status, status, "{path} {body}");
        walk::check(&document, "post", path, &answer);
        let request = &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        let named = status == StatusCode::BAD_REQUEST && body["temperature"] != Value::Null;
        assert!(!named || !schema::complaints(&document, request, &body).is_empty(), "{path} {body} is described");
    }
}

#[tokio::test]
async fn the_api_page_loads_only_files_of_this_server() {
    let app = app().await;
    let page = walk::send(&app.state, "get", "/docs", None).await.text();
    assert!(!page.contains("://") && !page.contains("=\"/"), "{page}");
    for name in page.split('"').filter(|word| word.starts_with("docs/") || word.starts_with("playground/")) {
        let file = walk::send(&app.state, "get", &format!("/{name}"), None).await;
        assert_eq!((file.status, file.body.is_empty()), (StatusCode::OK, false), "{name}");
        assert!(file.header("content-security-policy").starts_with("default-src 'self'"));
    }
    assert_eq!(walk::send(&app.state, "get", "/docs/index.html", None).await.status, StatusCode::NOT_FOUND);
}
