//! Errors use the terms of JSON: every described field gets values of wrong types, and no error names a Rust type.

use std::sync::LazyLock;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::{ApiOptions, AppState};

use crate::common::{checkpoint, send, text};

/// Terms of serde and of Rust.
const WORDS: [&str; 16] = [
    "u32",
    "u64",
    "i64",
    "f64",
    "usize",
    "struct",
    "enum",
    "variant",
    "tuple",
    "untagged",
    "sequence",
    "invalid type",
    "invalid value",
    "unit",
    "deserialize",
    "floating point",
];

/// The shipped model, limited to short texts: a body that happens to be valid may ask for the longest text.
static STATE: LazyLock<AppState> = LazyLock::new(|| {
    let (mut served, _thread) = open(&checkpoint(), &OpenOptions::default()).unwrap();
    served.limits.max_tokens = 4;
    let state = AppState::new(ApiOptions::default());
    state.serve(served);
    state
});

async fn ask(path: &str, body: &str) -> (StatusCode, String) {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let response = send(&STATE, request.body(Body::from(body.to_owned())).unwrap()).await;
    (response.status(), text(response).await)
}

#[tokio::test]
async fn no_error_names_a_type_of_rust() {
    let document = send(&STATE, Request::get("/openapi.json").body(Body::empty()).unwrap()).await;
    let document: Value = serde_json::from_str(&text(document).await).unwrap();
    let wrong =
        [json!({"?": [{}]}), json!([[[]]]), json!("?"), json!(-1), json!(1.5), json!(1e30), json!(true), json!([{}])];
    let mut seen = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let name = item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str();
        let Some(name) = name.and_then(|name| name.rsplit('/').next()) else { continue };
        let fields = document["components"]["schemas"][name]["properties"].as_object().unwrap();
        for field in fields.keys().filter(|field| *field != "stream") {
            for value in &wrong {
                let (status, answer) = ask(path, &json!({field: value}).to_string()).await;
                let found = WORDS.iter().find(|word| {
                    answer
                        .split(|c: char| !c.is_alphanumeric() && c != ' ')
                        .any(|part| format!(" {part} ").contains(&format!(" {word} ")))
                });
                assert_eq!(found, None, "{path} {field} {value}: {status} {answer}");
                seen += 1;
            }
        }
    }
    assert!(seen > 1000, "{seen}");
}

#[tokio::test]
async fn errors_say_what_a_field_takes() {
    for (body, message) in [
        (json!({"max_tokens": -1}), "max_tokens must be a whole number, at least 1, found -1"),
        (json!({"max_tokens": "16"}), "max_tokens must be a whole number, at least 1, found \"16\""),
        (json!({"temperature": "hot"}), "temperature must be a number, found \"hot\""),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role must be given"),
        (
            json!({"messages": [{"role": "user", "content": 7}]}),
            "messages[0].content must be a string or an array of text parts",
        ),
        (json!({"stop": 1}), "stop must be a string or an array of strings"),
        (json!({"on_disconnect": "stay"}), "on_disconnect must be one of: rollback, commit, continue, found \"stay\""),
        (json!({"on_disconnect": 5}), "on_disconnect must be a string"),
        (json!({"stream_options": 1}), "stream_options must be an object, found 1"),
        (
            json!({"messages": [{"role": "narrator", "content": "x"}]}),
            "messages[0].role must be one of system, developer, user, assistant, tool, found \"narrator\"",
        ),
    ] {
        let (status, answer) = ask("/v1/chat/completions", &body.to_string()).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, &answer["error"]["message"]), (StatusCode::BAD_REQUEST, &json!(message)));
    }
}
