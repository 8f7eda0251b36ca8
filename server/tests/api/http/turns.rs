//! Turns of sessions: the version that their responses name, and the messages that they take.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::common::sessions::{Answer, App, app, prompt, session};
use crate::common::with;

fn path(session: &Value) -> String {
    format!("/v1/sessions/{}", session["id"].as_str().unwrap())
}

/// Checks that a response names `version` in its headers.
fn assert_named(answer: &Answer, version: &Value) {
    let version = version.as_str().unwrap();
    assert_eq!(answer.header("x-session-version"), version);
    assert_eq!(answer.header("etag"), format!("\"{version}\""));
}

async fn say(app: &App, session: &Value, messages: Value, more: Value) -> Answer {
    let body = json!({"messages": messages, "session": session["id"], "max_tokens": 8, "temperature": 0});
    app.post("/v1/chat/completions", with(body, more)).await
}

#[tokio::test]
async fn a_grammar_for_an_answer_that_continues_is_refused_under_its_own_name() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    say(&app, &made, json!([{"role": "user", "content": "Once"}]), json!({"ignore_eos": true})).await;
    for (param, more) in [
        ("response_format", json!({"response_format": {"type": "json_object"}})),
        ("regex", json!({"regex": "[a-z]*"})),
    ] {
        let answer = say(&app, &made, json!([]), more).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(param)));
        let message = format!("{param} must be absent where the previous answer continues, found one");
        assert_eq!(answer.json()["error"]["message"], message);
    }
}

#[tokio::test]
async fn the_headers_of_a_turn_name_the_version_that_it_makes() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let turn = |more: Value| with(prompt("Once", json!({"session": made["id"]})), more);
    let whole = app.post("/v1/completions", turn(json!({}))).await;
    assert_named(&whole, &whole.json()["session"]["version"]);

    // The entity tag is the one that the next turn may send in `If-Match`.
    let tag = whole.header("etag");
    let next = app.send(Method::POST, "/v1/completions", turn(json!({})), &[("if-match", &tag)]).await;
    assert_eq!(next.status, StatusCode::OK, "{}", next.text());
    let stale = app.send(Method::POST, "/v1/completions", turn(json!({})), &[("if-match", &tag)]).await;
    assert_eq!(stale.status, StatusCode::PRECONDITION_FAILED);

    let streamed = app.post("/v1/completions", turn(json!({"stream": true}))).await;
    assert_named(&streamed, &streamed.texts().1["version"]);
    let chat = say(&app, &made, json!([{"role": "user", "content": "And?"}]), json!({})).await;
    assert_named(&chat, &chat.json()["session"]["version"]);
    let head = app.get(&path(&made)).await;
    assert_named(&head, &chat.json()["session"]["version"]);
    let appended = app.post(&format!("{}/append", path(&made)), json!({"text": " Well."})).await;
    assert_named(&appended, &appended.json()["version"]);

    let none = app.post("/v1/completions", prompt("Once", json!({}))).await;
    assert_eq!((none.header("etag"), none.header("x-session-version")), (String::new(), String::new()));
}

#[tokio::test]
async fn a_repeated_turn_names_the_same_version() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let key = [("idempotency-key", "one")];
    for stream in [false, true] {
        let body = with(prompt("Once", json!({"session": made["id"]})), json!({"stream": stream}));
        let key = [(key[0].0, if stream { "two" } else { key[0].1 })];
        let first = app.send(Method::POST, "/v1/completions", body.clone(), &key).await;
        let again = app.send(Method::POST, "/v1/completions", body, &key).await;
        let version = Value::from(first.header("x-session-version"));
        assert_named(&first, &version);
        assert_named(&again, &version);
        assert_eq!(app.get(&path(&made)).await.json()["version"], version);
    }
}

#[tokio::test]
async fn an_interrupted_stream_has_named_a_version_that_does_not_exist() {
    let app = app().await;
    let made = session(&app, json!({"text": "Once"})).await;
    let long = json!({"session": made["id"], "stream": true, "max_tokens": 100_000, "ignore_eos": true});
    let mut running = app.open("/v1/completions", with(prompt(" upon", json!({})), long), &[]).await;
    running.read_some().await;
    let version = running.header("x-session-version");
    drop(running);
    assert_eq!(app.until_free(&path(&made)).await["version"], made["version"]);
    let missing = app.post(&format!("{}/rewind", path(&made)), json!({"version": version})).await;
    assert_eq!(missing.status, StatusCode::NOT_FOUND);
    let stale = app
        .send(Method::POST, "/v1/completions", prompt("", json!({"session": made["id"]})), &[("if-match", &version)])
        .await;
    assert_eq!(stale.status, StatusCode::PRECONDITION_FAILED);
}

#[tokio::test]
async fn a_turn_that_resends_answers_is_refused_unless_they_are_to_be_appended() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let hello = message("user", "Tell me of the sea.");
    // A new conversation may begin with answers, such as examples.
    let examples = json!([message("user", "Hm?"), message("assistant", "Hm."), hello]);
    let first = say(&app, &made, examples.clone(), json!({})).await;
    assert_eq!(first.status, StatusCode::OK, "{}", first.text());
    let first = first.json();
    let answer = message("assistant", first["choices"][0]["message"]["content"].as_str().unwrap());
    let resent = json!([hello, answer, message("user", "And of the ships?")]);
    let refused = say(&app, &made, resent.clone(), json!({})).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "messages".into()));
    let said = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(said.contains("messages[1]") && said.contains("history: \"append\""), "{said}");
    assert_eq!(app.get(&path(&made)).await.json()["version"], first["session"]["version"], "nothing was committed");

    let tokens = |answer: &Answer| answer.json()["session"]["tokens"].as_u64().unwrap();
    let fork = app.post(&format!("{}/fork", path(&made)), json!({})).await.json()["data"][0].clone();
    let appended = say(&app, &fork, resent, json!({"history": "append"})).await;
    assert_eq!(appended.status, StatusCode::OK, "{}", appended.text());
    let new = say(&app, &made, json!([message("user", "And of the ships?")]), json!({"history": "append"})).await;
    assert!(tokens(&appended) > tokens(&new), "it has read the answer twice");

    // An answer that is to be continued counts as new.
    let begun = json!([message("user", "Go on."), message("assistant", "Well,")]);
    let continued = say(&app, &made, begun, json!({"continue_final_message": true})).await;
    assert_eq!(continued.status, StatusCode::OK, "{}", continued.text());

    for (body, param) in [
        (json!({"messages": [hello], "history": "append"}), "history"),
        (json!({"messages": [hello], "session": made["id"], "history": "replace"}), "history"),
    ] {
        let refused = app.post("/v1/chat/completions", body).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, param.into()));
    }
    let elsewhere = app.post("/v1/completions", prompt("A", json!({"history": "append"}))).await;
    assert_eq!((elsewhere.status, elsewhere.param()), (StatusCode::BAD_REQUEST, "history".into()));
    let whole = app.post("/v1/chat/completions", json!({"messages": examples, "max_tokens": 2})).await;
    assert_eq!(whole.status, StatusCode::OK, "without a session the whole conversation is sent");
}
