//! The prefix cache: a text that begins like earlier ones starts from a cached state, and is the same as without it.

use crate::common::sessions::{App, app, app_with, prompt, session};
use axum::http::Method;
use serde_json::{Value, json};

const INSTRUCTIONS: &str = "You are the keeper of a lighthouse on a small island far from the coast. You have lived there for \
    thirty years, and you tell your visitors of the storms, the ships and the birds that you have seen. You speak slowly, in \
    short sentences, and never of yourself.";

fn chat(question: &str, more: Value) -> Value {
    let messages = json!([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]);
    let body = json!({"messages": messages, "max_tokens": 8, "seed": 3, "return_token_ids": true});
    crate::common::with(body, more)
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn ids(answer: &Value) -> Value {
    answer["choices"][0]["token_ids"].clone()
}

async fn asked(app: &App, body: Value) -> Value {
    app.post("/v1/chat/completions", body).await.json()
}

/// Returns how many tokens all questions after these instructions begin with.
async fn instructions(app: &App) -> u64 {
    let mut both = Vec::new();
    for question in ["Is it cold?", "What did you see?"] {
        let messages = chat(question, json!({}))["messages"].clone();
        let answer = app.post("/tokenize", json!({"messages": messages})).await.json();
        both.push(answer["tokens"].as_array().unwrap().clone());
    }
    both[0].iter().zip(&both[1]).take_while(|(a, b)| a == b).count() as u64
}

#[tokio::test]
async fn the_third_text_with_the_same_instructions_starts_after_them() {
    let app = app_with(b"0123456789abcdef0123456789abcdef").await;
    let common = instructions(&app).await;
    assert!(common > 50, "{common}");
    let questions = ["Is it cold?", "What did you see?", "Are you not lonely?", "When does the boat come?"];
    for (question, expected) in questions.iter().zip([0, 0, common, common]) {
        let before = app.engine_stats().prompt_tokens;
        let answer = asked(&app, chat(question, json!({}))).await;
        assert_eq!(cached(&answer), expected, "{question}");
        let read = app.engine_stats().prompt_tokens - before;
        assert_eq!(read, answer["usage"]["prompt_tokens"].as_u64().unwrap() - expected);
        // A request whose state the client keeps does not use the cache.
        let without = asked(&app, chat(question, json!({"return_state": true}))).await;
        assert_eq!(cached(&without), 0);
        assert_eq!(ids(&answer), ids(&without), "{question}");
    }
    // Owners do not share cached prefixes.
    let other =
        app.send(Method::POST, "/v1/chat/completions", chat(questions[0], json!({})), &[("authorization", "Bearer b")]);
    assert_eq!(cached(&other.await.json()), 0);
}

#[tokio::test]
async fn first_turns_of_sessions_and_stored_responses_begin_like_other_texts() {
    let app = app().await;
    let common = instructions(&app).await;
    let plain = asked(&app, chat("Is it cold?", json!({}))).await;
    asked(&app, chat("What did you see?", json!({}))).await;

    // A session's first turn uses the cache; the next one starts from the session's own state.
    let made = session(&app, json!({"seed": 3})).await;
    let of_session = json!({"session": made["id"]});
    let first = asked(&app, chat("Do you sleep well?", of_session)).await;
    assert_eq!(cached(&first), common);
    assert_eq!((&first["session"]["restored"], &first["session"]["recomputed_tokens"]), (&json!(false), &json!(0)));
    let whole = asked(&app, chat("Do you sleep well?", json!({}))).await;
    assert_eq!(ids(&first), ids(&whole));
    assert_eq!(cached(&whole), whole["usage"]["prompt_tokens"].as_u64().unwrap() - 1, "and leave states like them");
    let more = json!({"messages": [{"role": "user", "content": "And well?"}], "session": made["id"], "max_tokens": 4});
    let second = asked(&app, more).await;
    assert_eq!((cached(&second), &second["session"]["restored"]), (0, &json!(true)));

    // So does a session that is created with messages.
    let before = app.engine_stats().prompt_tokens;
    let messages = chat("Is it cold?", json!({}))["messages"].clone();
    let made = app.post("/v1/sessions", json!({"messages": messages, "seed": 3})).await.json();
    let read = app.engine_stats().prompt_tokens - before;
    let tokens = made["tokens"].as_u64().unwrap();
    assert!(read > 0 && read <= tokens - common, "{read} of {tokens}");
    let again = asked(&app, chat("Is it cold?", json!({}))).await;
    assert_eq!(ids(&again), ids(&plain));

    // A stored response, and then a client that sends the whole history instead of its id. At temperature 0, because
    // the tokenizer may split a sampled answer that is cut off into other tokens.
    let ask =
        |input: Value| json!({"instructions": INSTRUCTIONS, "input": input, "max_output_tokens": 8, "temperature": 0});
    let response = app.post("/v1/responses", ask(json!("Have you a dog?"))).await.json();
    assert_eq!(response["store"], true);
    let details = |response: &Value| response["usage"]["input_tokens_details"].clone();
    assert_eq!(details(&response)["cached_tokens"], common);
    let answer = response["output"][0]["content"][0]["text"].as_str().unwrap();
    let say = |role: &str, content: &str| json!({"role": role, "content": content});
    let history = json!([say("user", "Have you a dog?"), say("assistant", answer), say("user", "Why?")]);
    let longer = app.post("/v1/responses", ask(history)).await.json();
    let (cached, input) = (&details(&longer)["cached_tokens"], &response["usage"]["input_tokens"]);
    assert!(cached.as_u64() >= input.as_u64(), "{cached} of {input}");
}

#[tokio::test]
async fn a_state_that_the_client_keeps_neither_uses_the_cache_nor_fills_it() {
    let app = app_with(b"0123456789abcdef0123456789abcdef").await;
    let text = "It was late in the autumn, and the rain had not ceased since Sunday.";
    let size = async || {
        app.get("/metrics").await.text().lines().find(|line| line.starts_with("tidegate_prefixes ")).unwrap().to_owned()
    };
    app.post("/v1/completions", prompt(text, json!({"return_state": true}))).await.json();
    assert_eq!(size().await, "tidegate_prefixes 0");
    let known = app.post("/v1/completions", prompt(text, json!({}))).await.json();
    assert_eq!(cached(&known), 0);
    let alone = app.post("/v1/completions", prompt(text, json!({"return_state": true}))).await.json();
    assert_eq!((cached(&alone), ids(&alone)), (0, ids(&known)));
}
