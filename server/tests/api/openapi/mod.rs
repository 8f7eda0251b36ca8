//! Holds `/openapi.json` to the server: the routes, the fields of the types that are read, and that every example is
//! answered as described.

mod schema;
mod sources;
mod walk;

use crate::common::sessions::app;
use axum::http::StatusCode;
use serde_json::{Value, json};

#[tokio::test]
async fn every_route_is_described_and_every_description_is_a_route() {
    let document = walk::document(&app().await.state).await;
    let mut described: Vec<String> = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        described.extend(item.as_object().unwrap().keys().map(|method| format!("{method} {path}")));
    }
    described.sort();
    assert_eq!(described, sources::routes());
}

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
        ("formats/openai/wire.rs", "GenerationRequest", &["CompletionRequest", "ChatRequest"][..]),
        ("formats/openai/wire.rs", "StreamOptions", &["StreamOptions"]),
        ("formats/responses/wire.rs", "ResponseRequest", &["ResponseRequest"]),
        ("formats/responses/wire.rs", "StreamOptions", &["ResponseStreamOptions"]),
        ("formats/responses/wire.rs", "TextConfig", &["TextConfig"]),
        ("formats/anthropic/wire.rs", "MessagesRequest", &["MessagesRequest"]),
        ("formats/llamacpp/wire.rs", "CompletionRequest", &["LlamaRequest"]),
        ("formats/tokens.rs", "TokenizeRequest", &["TokenizeRequest"]),
        ("formats/tokens.rs", "DetokenizeRequest", &["DetokenizeRequest"]),
        ("formats/tokens.rs", "TemplateRequest", &["TemplateRequest"]),
    ] {
        let mut fields = sources::fields(file, read);
        // These are taken out of the rest, before anything else is made of it.
        if ["GenerationRequest", "ResponseRequest"].contains(&read) {
            fields.extend(
                sources::forms()
                    .into_iter()
                    .filter(|field| file == "formats/openai/wire.rs" || field != "response_format"),
            );
        }
        if file == "formats/openai/wire.rs" && read == "GenerationRequest" {
            fields.extend(["tools", "tool_choice", "parallel_tool_calls"].map(str::to_owned));
        }
        fields.sort();
        assert_eq!(described(names), fields, "{names:?} and {read} in {file}");
    }
}

#[tokio::test]
async fn every_example_is_answered_as_described() {
    let app = app().await;
    let tried = walk::all(&app.state).await;
    let document = walk::document(&app.state).await;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, _) in item.as_object().unwrap() {
            assert!(tried.contains(&format!("{method} {path}")), "{method} {path} has not been tried");
        }
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
async fn the_page_that_shows_it_needs_nothing_from_elsewhere() {
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
