//! Tokenization routes, in the formats of llama.cpp and vLLM.

use crate::common::{scripted, send, shipped, text};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

async fn ask(state: &AppState, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

async fn answered(path: &str, body: Value) -> Value {
    let (status, answer) = ask(&shipped(), path, &body).await;
    assert_eq!(status, StatusCode::OK, "{body}: {answer}");
    answer
}

/// Returns the prompt's ids that `/v1/completions` reads.
async fn read_by_the_model(prompt: &str) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": 1, "return_token_ids": true});
    answered("/v1/completions", body).await["choices"][0]["prompt_token_ids"].clone()
}

#[tokio::test]
async fn tokens_match_those_of_completions_and_decode_to_the_text() {
    for prompt in ["Once upon a time", "", "naïve ☃ 🦀\n\n  x", "a<|endoftext|>b"] {
        let read = read_by_the_model(prompt).await;
        let vllm = answered("/tokenize", json!({"prompt": prompt})).await;
        assert_eq!(vllm["tokens"], read);
        assert_eq!(vllm["count"], read.as_array().unwrap().len());
        assert_eq!((&vllm["max_model_len"], &vllm["token_strs"]), (&json!(1_000_000), &Value::Null));
        let whole = answered("/tokenize", json!({"content": prompt, "add_special": true})).await;
        assert_eq!(whole["tokens"], read);
        let bare = answered("/tokenize", json!({"content": prompt})).await;
        assert_eq!(bare["tokens"].as_array().unwrap()[..], read.as_array().unwrap()[1..]);
        let same = answered("/tokenize", json!({"prompt": prompt, "add_special_tokens": false})).await;
        assert_eq!(same["tokens"], bare["tokens"]);
        let back = answered("/detokenize", json!({"tokens": bare["tokens"]})).await;
        assert_eq!(back, json!({"content": prompt, "prompt": prompt}));
    }
}

#[tokio::test]
async fn a_special_token_is_a_token_or_text_as_requested() {
    let token = answered("/tokenize", json!({"content": "<|endoftext|>"})).await;
    assert_eq!(token["tokens"], json!([0]));
    let plain = answered("/tokenize", json!({"content": "<|endoftext|>", "parse_special": false})).await;
    assert!(plain["count"].as_u64() > Some(1) && !plain["tokens"].as_array().unwrap().contains(&json!(0)), "{plain}");
    let back = answered("/detokenize", json!({"tokens": plain["tokens"]})).await;
    assert_eq!(back["content"], "<|endoftext|>");
    assert_eq!(answered("/detokenize", json!({"tokens": [0]})).await["content"], "<|endoftext|>");
}

#[tokio::test]
async fn pieces_and_names_are_those_of_the_tokens() {
    let text = "The ☃ sat";
    let pieces = answered("/tokenize", json!({"content": text, "with_pieces": true})).await;
    let pieces = pieces["tokens"].as_array().unwrap().clone();
    let bytes = |piece: &Value| match piece {
        Value::String(text) => text.as_bytes().to_vec(),
        bytes => serde_json::from_value(bytes.clone()).unwrap(),
    };
    assert_eq!(pieces.iter().flat_map(|piece| bytes(&piece["piece"])).collect::<Vec<u8>>(), text.as_bytes());
    assert!(
        pieces.iter().any(|piece| piece["piece"].is_array()),
        "the snowman is split over several tokens: {pieces:?}"
    );
    let names = answered("/tokenize", json!({"prompt": "The cat", "return_token_strs": true})).await;
    assert_eq!(names["token_strs"], json!(["<|endoftext|>", "The", "Ġcat"]));
}

#[tokio::test]
async fn messages_are_rendered_like_those_of_chat() {
    let messages = json!([{"role": "user", "content": "Tell me."}, {"role": "user", "content": [{"type": "text", "text": "More."}]}]);
    let shown = answered("/apply-template", json!({"messages": messages})).await;
    assert_eq!(shown, json!({"prompt": "Tell me.\n\nMore.\n\n"}));
    let closed = answered("/apply-template", json!({"messages": messages, "add_generation_prompt": false})).await;
    assert_eq!(closed, json!({"prompt": "Tell me.\n\nMore."}));
    let tokens = answered("/tokenize", json!({"messages": messages})).await;
    let chat = json!({"messages": messages, "max_tokens": 1});
    let chat = answered("/v1/chat/completions", chat).await;
    assert_eq!(tokens["count"], chat["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn invalid_requests_are_refused_by_name() {
    let text = "x".repeat(10);
    for (path, param, body) in [
        ("/tokenize", "prompt", json!({})),
        ("/tokenize", "prompt", json!({"prompt": text, "content": text})),
        ("/tokenize", "prompt", json!({"prompt": 1})),
        ("/tokenize", "content", json!({"content": [1]})),
        ("/tokenize", "model", json!({"prompt": text, "model": 1})),
        ("/tokenize", "messages", json!({"messages": []})),
        ("/tokenize", "messages", json!({"messages": [{"role": "user"}]})),
        (
            "/tokenize",
            "add_special_tokens",
            json!({"messages": [{"role": "user", "content": ""}], "add_special_tokens": true}),
        ),
        (
            "/tokenize",
            "chat_template",
            json!({"messages": [{"role": "user", "content": ""}], "chat_template": "{{ 1 }}"}),
        ),
        ("/detokenize", "tokens", json!({})),
        ("/detokenize", "tokens", json!({"tokens": "1"})),
        ("/detokenize", "tokens", json!({"tokens": [-1]})),
        ("/detokenize", "tokens", json!({"tokens": [4096]})),
        ("/detokenize", "tokens", json!({"tokens": [18_446_744_073_709_551_615_u64]})),
        ("/apply-template", "messages", json!({})),
        (
            "/apply-template",
            "chat_template",
            json!({"messages": [{"role": "user", "content": ""}], "chat_template": "x"}),
        ),
    ] {
        let (status, answer) = ask(&shipped(), path, &body).await;
        let error = &answer["error"];
        assert_eq!(
            (status, error["param"].as_str()),
            (StatusCode::BAD_REQUEST, Some(param)),
            "{path} {body}: {answer}"
        );
        assert!(error["message"].as_str().unwrap().contains(param), "{answer}");
    }
    let (status, answer) = ask(&shipped(), "/tokenize", &json!({"prompt": "x", "model": "gpt-4"})).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
}

#[tokio::test]
async fn long_texts_are_refused_with_the_limit() {
    let (state, ..) = scripted(crate::common::fake::Fake::new(1), 1);
    for (path, param, body) in [
        ("/tokenize", "prompt", json!({"prompt": "a b ".repeat(600)})),
        ("/detokenize", "tokens", json!({"tokens": vec![1; 1001]})),
    ] {
        let (status, answer) = ask(&state, path, &body).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("1000 tokens"), "{answer}");
    }
}

#[tokio::test]
async fn embeddings_are_refused_as_unsupported() {
    for path in ["/v1/embeddings", "/embeddings", "/embedding"] {
        let (status, answer) = ask(&shipped(), path, &json!({"input": "x", "model": "tidegate-tiny"})).await;
        assert_eq!(status, StatusCode::NOT_IMPLEMENTED);
        assert_eq!(answer["error"]["code"], "not_supported", "{answer}");
    }
}
