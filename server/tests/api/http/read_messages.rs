//! Reading back the messages of conversations, whatever format they came in.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::session::Location;

use crate::common::sessions::{App, app, app_of, prompt, session};
use crate::common::translator::{Translator, serving};

async fn get(app: &App, id: &str, query: &str) -> Value {
    let answer = app.send(Method::GET, &format!("/v1/sessions/{id}/messages{query}"), Value::Null, &[]).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

/// Returns the role and content of each message.
async fn said(app: &App, id: &str) -> Vec<(String, Value)> {
    let all = get(app, id, "").await;
    let data = all["data"].as_array().unwrap();
    assert_eq!(all["total"], data.len());
    data.iter().map(|message| (message["role"].as_str().unwrap().to_owned(), message["content"].clone())).collect()
}

fn message(role: &str, content: impl Into<Value>) -> (String, Value) {
    (role.to_owned(), content.into())
}

async fn new(app: &App, body: Value) -> String {
    session(app, body).await["id"].as_str().unwrap().to_owned()
}

async fn chat(app: &App, id: &str, more: Value) -> Value {
    let body = crate::common::with(json!({"session": id, "max_tokens": 6, "temperature": 0}), more);
    let answer = app.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn content(answer: &Value) -> Value {
    answer["choices"][0]["message"]["content"].clone()
}

#[tokio::test]
async fn a_chat_has_the_messages_that_were_sent_and_answered() {
    let app = app().await;
    let id = new(&app, json!({"messages": [{"role": "system", "content": "Tell tales."}]})).await;
    let mut expected = vec![message("system", "Tell tales.")];
    for question in ["Tell me of a fox.", "user", "And of a crow? <|endoftext|> ☃"] {
        let body = json!({"messages": [{"role": "user", "content": question}], "ignore_eos": true});
        let answer = chat(&app, &id, body).await;
        expected.extend([message("user", question), message("assistant", content(&answer))]);
        assert_eq!(said(&app, &id).await, expected);
    }
    // An answer that a later turn continues is one message, with the version that began it.
    let last = get(&app, &id, "?start=6").await["data"][0]["version"].clone();
    let more = chat(&app, &id, json!({"messages": []})).await;
    let whole = expected.pop().unwrap().1.as_str().unwrap().to_owned() + content(&more).as_str().unwrap();
    expected.push(message("assistant", whole));
    assert_eq!(said(&app, &id).await, expected);
    let turns = app.send(Method::GET, &format!("/v1/sessions/{id}/turns"), Value::Null, &[]).await.json();
    let versions: Vec<&Value> = turns["data"].as_array().unwrap().iter().map(|turn| &turn["version"]).collect();
    let all = get(&app, &id, "").await;
    let by: Vec<&Value> = all["data"].as_array().unwrap().iter().map(|message| &message["version"]).collect();
    assert_eq!(by, [0, 1, 1, 2, 2, 3, 3].map(|at| versions[at]));
    assert_eq!(*by[6], last);
    // Any range, and any version.
    for start in 0..=7 {
        for end in start..=7 {
            let part = get(&app, &id, &format!("?start={start}&end={end}")).await;
            let found: Vec<&Value> = part["data"].as_array().unwrap().iter().collect();
            assert_eq!(found, all["data"].as_array().unwrap()[start..end].iter().collect::<Vec<_>>());
            assert_eq!((&part["start"], &part["end"], &part["total"]), (&json!(start), &json!(end), &json!(7)));
        }
    }
    let earlier = get(&app, &id, &format!("?version={}", versions[2].as_str().unwrap())).await;
    assert_eq!(earlier["total"], 5);
    let answer = app.send(Method::GET, &format!("/v1/sessions/{id}/messages?end=8"), Value::Null, &[]).await;
    assert_eq!((answer.status, answer.param().as_str()), (StatusCode::BAD_REQUEST, "end"));
    assert!(answer.text().contains("from 0 to 7"), "{}", answer.text());
}

#[tokio::test]
async fn plain_text_is_the_users_and_what_was_generated_the_assistants() {
    let app = app().await;
    let id = new(&app, json!({"text": "Once upon"})).await;
    app.post(&format!("/v1/sessions/{id}/append"), json!({"text": " a time"})).await;
    let body = prompt(" there", json!({"session": id, "max_tokens": 3}));
    let first = app.post("/v1/completions", body).await.json();
    let second = app.post("/v1/completions", prompt("", json!({"session": id, "prompt": null}))).await.json();
    let text = |answer: &Value| answer["choices"][0]["text"].as_str().unwrap().to_owned();
    let expected = [
        message("user", "Once upon"),
        message("user", " a time"),
        message("user", " there"),
        message("assistant", text(&first) + &text(&second)),
    ];
    assert_eq!(said(&app, &id).await, expected);
    assert_eq!(said(&app, &new(&app, json!({})).await).await, []);
}

#[tokio::test]
async fn an_answer_that_the_client_begins_is_one_message() {
    let app = app().await;
    let id = new(&app, json!({})).await;
    let messages = json!([{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "The fox"}]);
    let body = json!({"messages": messages, "add_generation_prompt": false, "continue_final_message": true});
    let answer = chat(&app, &id, body).await;
    let whole = format!("The fox{}", content(&answer).as_str().unwrap());
    assert_eq!(said(&app, &id).await, [message("user", "Tell me."), message("assistant", whole)]);
}

#[tokio::test]
async fn calls_of_tools_are_calls_again() {
    let app = app().await;
    let id = new(&app, json!({})).await;
    let schema = json!({"type": "object", "required": ["size"], "additionalProperties": false,
        "properties": {"size": {"enum": ["small", "large"]}}});
    let tools = json!([{"type": "function", "function": {"name": "measure", "parameters": schema}}]);
    let question = json!([{"role": "user", "content": "How large is it?"}]);
    let body = json!({"messages": question, "tools": tools, "tool_choice": "required", "max_tokens": 64});
    let answer = chat(&app, &id, body).await;
    let calls = &answer["choices"][0]["message"]["tool_calls"];
    assert_eq!(calls.as_array().unwrap().len(), 1, "{answer}");
    let found = get(&app, &id, "").await;
    assert_eq!((&found["data"][1]["content"], &found["data"][1]["tool_calls"]), (&Value::Null, calls));
    let reply = json!([{"role": "tool", "content": "It is small.", "tool_call_id": calls[0]["id"]}]);
    chat(&app, &id, json!({"messages": reply})).await;
    let found = get(&app, &id, "?start=2&end=3").await;
    assert_eq!((&found["data"][0]["role"], &found["data"][0]["content"]), (&json!("tool"), &json!("It is small.")));
    assert_eq!(found["data"][0]["tool_call_id"], calls[0]["id"]);
    // Calls that the client sent also have their arguments as text.
    let sent = json!([{"role": "user", "content": "Hm."}, {"role": "assistant", "content": null, "tool_calls": calls}]);
    let made = new(&app, json!({"messages": sent})).await;
    let found = get(&app, &made, "?start=1").await;
    let arguments =
        |calls: &Value| serde_json::from_str::<Value>(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments(&found["data"][0]["tool_calls"]), arguments(calls));
    assert_eq!(found["data"][0]["content"], Value::Null);
}

#[tokio::test]
async fn held_text_that_a_stop_string_takes_is_in_no_message() {
    let app = app().await;
    let id = new(&app, json!({"text": "Once upon a time there"})).await;
    let ask = async |id: &str, prompt: Value, more: Value| {
        let body = json!({"session": id, "prompt": prompt, "temperature": 0});
        app.post("/v1/completions", crate::common::with(body, more)).await.json()
    };
    let whole =
        ask(&id, json!(" was"), json!({"max_tokens": 24})).await["choices"][0]["text"].as_str().unwrap().to_owned();
    let other = new(&app, json!({"text": "Once upon a time there"})).await;
    let stop = &whole[..whole.char_indices().nth(whole.chars().count() / 2).unwrap().0];
    for _ in 0..2 {
        let turn = if said(&app, &other).await.len() == 1 { json!(" was") } else { Value::Null };
        ask(&other, turn, json!({"stop": [stop], "max_tokens": 1})).await;
    }
    let last = said(&app, &other).await.pop().unwrap().1;
    assert!(whole.starts_with(last.as_str().unwrap()) && !last.as_str().unwrap().is_empty(), "{last}");
    ask(&other, Value::Null, json!({"stop": [stop], "max_tokens": 24})).await;
    assert_eq!(said(&app, &other).await.pop().unwrap(), message("assistant", ""));
}

#[tokio::test]
async fn a_translation_is_a_source_and_its_text() {
    let (served, _) = serving(Translator::new(4, std::time::Duration::ZERO));
    let app = app_of(served, Location::Memory).await;
    let id = new(&app, json!({})).await;
    for source in ["Das alte Haus.", "Der Fuchs."] {
        let body = json!({"session": id, "prompt": source, "max_tokens": 6, "temperature": 0});
        let answer = app.post("/v1/completions", body).await.json();
        let translation = answer["choices"][0]["text"].clone();
        assert_eq!(said(&app, &id).await, [message("user", source), message("assistant", translation)]);
    }
}
