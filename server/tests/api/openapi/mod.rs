//! Compares `/openapi.json` with the server: every route is described and answers every example as described.

mod schema;
mod walk;

use crate::common::sessions::app;
use axum::http::StatusCode;
use serde_json::{Value, json};

/// Sends a value that violates the schema in each described field in turn. The refusal must name the field, which shows
/// that the route reads it.
#[tokio::test]
async fn every_described_field_is_read() {
    let app = app().await;
    let document = walk::document(&app.state).await;
    let wrong = [json!({"?": [{}]}), json!([[[]]]), json!("?")];
    let mut fields = 0;
    for (path, method, content) in walk::bodies(&document) {
        let schema = document.pointer(&content["schema"]["$ref"].as_str().expect("a named schema")[1..]).unwrap();
        let example = content["examples"].as_object().and_then(|examples| examples.values().next());
        let example = example.map_or_else(|| json!({}), |example| example["value"].clone());
        for (name, field) in schema["properties"].as_object().unwrap() {
            let against = |value: &&Value| !schema::complaints(&document, field, value).is_empty();
            // Some fields accept any value.
            let Some(value) = wrong.iter().find(against) else { continue };
            let mut body = example.clone();
            body[name] = value.clone();
            let answer = walk::send(&app.state, method, &walk::filled(&app.state, path).await, Some(&body)).await;
            assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{method} {path} with {name}: {value}");
            assert!(answer.text().contains(name), "{method} {path} with {name}: {value}: {}", answer.text());
            fields += 1;
        }
    }
    assert!(fields > 150, "{fields}");
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

/// An empty list fits both descriptions: of token ids and of token objects.
#[tokio::test]
async fn tokens_of_an_empty_text_are_as_described() {
    let app = app().await;
    let document = walk::document(&app.state).await;
    for body in [json!({"content": ""}), json!({"content": "", "with_pieces": true})] {
        let answer = walk::send(&app.state, "post", "/tokenize", Some(&body)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        walk::check(&document, "post", "/tokenize", &answer);
    }
}

#[tokio::test]
async fn what_excludes_what_in_a_new_session_is_described() {
    let app = app().await;
    let document = walk::document(&app.state).await;
    let schema = &document["components"]["schemas"]["CreateRequest"];
    let values = [
        ("text", json!("x")),
        ("tokens", json!([1])),
        ("messages", json!([{"role": "user", "content": "x"}])),
        ("version", json!(format!("ver_{}", "0".repeat(32)))),
        ("snapshot", json!("AAAA")),
        ("seed", json!(1)),
    ];
    for (at, (name, value)) in values.iter().enumerate() {
        for (other, more) in &values[at + 1..] {
            let alone = json!({*name: value, *other: null});
            assert!(schema::complaints(&document, schema, &alone).is_empty(), "{alone}");
            let both = json!({*name: value, *other: more});
            let may_be = *other == "seed" && ["text", "tokens", "messages"].contains(name);
            assert_eq!(schema::complaints(&document, schema, &both).is_empty(), may_be, "{both}");
            let status = walk::send(&app.state, "post", "/v1/sessions", Some(&both)).await.status;
            assert_eq!(status == StatusCode::BAD_REQUEST, !may_be, "{both}");
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
async fn the_headers_of_a_turn_are_described() {
    let app = app().await;
    let document = walk::document(&app.state).await;
    let session = walk::send(&app.state, "post", "/v1/sessions", Some(&json!({}))).await.text();
    let session: Value = serde_json::from_str(&session).unwrap();
    let message = json!([{"role": "user", "content": "Hello"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 1, "session": session["id"]})),
        ("/v1/chat/completions", json!({"messages": message, "max_tokens": 1, "session": session["id"]})),
        ("/completion", json!({"prompt": "Once", "n_predict": 1, "id_slot": 1})),
    ] {
        let answer = walk::send(&app.state, "post", path, Some(&body)).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        for name in ["etag", "x-session-version"] {
            assert!(!answer.header(name).is_empty(), "{path}: {name}");
            let described = &document["paths"][path]["post"]["responses"]["200"]["headers"][name];
            assert!(described.is_object(), "{path}: {name} is not described");
        }
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
