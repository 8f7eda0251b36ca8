//! Conversations as files: what a server with another store knows after an upload.

use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::{Location, Owner, SessionId, StoreOptions};

use crate::common::checkpoint;
use crate::common::sessions::{App, app, app_storing, session};

async fn read(app: &App, id: &str, what: &str) -> Value {
    let answer = app.send(Method::GET, &format!("/v1/sessions/{id}{what}"), Value::Null, &[]).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

async fn file(app: &App, id: &str) -> Bytes {
    app.send(Method::GET, &format!("/v1/sessions/{id}/snapshot"), Value::Null, &[]).await.body
}

async fn chat(app: &App, id: &str, question: &str) {
    let message = json!([{"role": "user", "content": question}]);
    let body = json!({"session": id, "messages": message, "max_tokens": 6, "temperature": 0, "label": question});
    let answer = app.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
}

/// Returns the role and content of each message.
fn said(messages: &Value) -> Vec<(Value, Value)> {
    let said = |message: &Value| (message["role"].clone(), message["content"].clone());
    messages["data"].as_array().unwrap().iter().map(said).collect()
}

#[tokio::test]
async fn an_upload_has_the_label_metadata_ancestors_and_text_of_the_file() {
    let [from, to] = [app().await, app().await];
    let made = session(&from, json!({"metadata": {"tale": "fox"}, "label": "first"})).await;
    let id = made["id"].as_str().unwrap();
    for question in ["Tell me of a fox.", "And of a crow?"] {
        chat(&from, id, question).await;
    }
    let whole = file(&from, id).await;
    let copy = to.upload(whole.clone()).await;
    assert_eq!(copy.status, StatusCode::CREATED, "{}", copy.text());
    let copy = copy.json();
    assert_eq!((&copy["metadata"], &copy["label"]), (&json!({"tale": "fox"}), &json!("And of a crow?")));
    let new = copy["id"].as_str().unwrap();
    for what in ["/text", "/tokens"] {
        let [before, after] = [read(&from, id, what).await, read(&to, new, what).await];
        assert_eq!((&before["text"], &before["tokens"]), (&after["text"], &after["tokens"]));
    }
    assert_eq!(said(&read(&to, new, "/messages").await), said(&read(&from, id, "/messages").await));
    // The file that the other server writes still contains the ancestors after another turn there.
    for app_and_id in [(&from, id), (&to, new)] {
        chat(app_and_id.0, app_and_id.1, "Go on.").await;
    }
    assert_eq!(said(&read(&to, new, "/messages").await), said(&read(&from, id, "/messages").await));
    let turns = read(&from, id, "/turns").await;
    let text = String::from_utf8_lossy(&file(&to, new).await).into_owned();
    for turn in &turns["data"].as_array().unwrap()[..2] {
        assert!(text.contains(&format!("\"version\":{}", turn["version"])), "{turn}");
    }
    assert!(text.contains("\"label\":\"first\""));

    // With a snapshot in the body of a new session, the body's label overrides that of the file.
    let encoded = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &whole);
    let own = session(&to, json!({"snapshot": encoded, "label": "mine"})).await;
    assert_eq!((&own["metadata"], &own["label"]), (&json!({"tale": "fox"}), &json!("mine")));
}

#[tokio::test]
async fn a_file_without_text_has_none_and_says_so() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once upon a time"})).await["id"].as_str().unwrap().to_owned();
    // A file of version 1, which has no text.
    let snapshot = app.store.load(Owner::default(), &SessionId::parse(&id).unwrap(), None).await.unwrap().1;
    let (served, _thread) = open(&checkpoint(), &OpenOptions::default()).unwrap();
    let old = served.codec.encode(&snapshot);
    // A file from a server that keeps no text.
    let options = StoreOptions { keep_text: false, ..StoreOptions::new(Location::Memory) };
    let other = app_storing(served, options).await;
    let silent = session(&other, json!({"text": "Once upon a time"})).await["id"].as_str().unwrap().to_owned();
    for bytes in [old.into(), file(&other, &silent).await] {
        let copy = app.upload(bytes).await;
        assert_eq!(copy.status, StatusCode::CREATED, "{}", copy.text());
        let copy = copy.json();
        for what in ["text", "tokens", "messages"] {
            let path = format!("/v1/sessions/{}/{what}", copy["id"].as_str().unwrap());
            let answer = app.send(Method::GET, &path, Value::Null, &[]).await;
            assert_eq!((answer.status, answer.code().as_str()), (StatusCode::NOT_FOUND, "text_not_kept"));
        }
        assert_eq!(copy["tokens"], read(&app, &id, "").await["tokens"]);
    }
}

#[tokio::test]
async fn a_file_whose_label_is_too_long_is_refused() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once", "label": "short"})).await["id"].as_str().unwrap().to_owned();
    let snapshot = app.store.load(Owner::default(), &SessionId::parse(&id).unwrap(), None).await.unwrap().1;
    let (served, _thread) = open(&checkpoint(), &OpenOptions::default()).unwrap();
    let conversation = |label: &str| tidegate_server::session::Conversation {
        label: Some(label.to_owned()),
        ..tidegate_server::session::Conversation::default()
    };
    let long = served.codec.encode_conversation(&snapshot, &conversation(&"x".repeat(257)));
    let refused = app.upload(long.into()).await;
    assert_eq!((refused.status, refused.param().as_str()), (StatusCode::BAD_REQUEST, "label"));
    let fits = served.codec.encode_conversation(&snapshot, &conversation(&"x".repeat(256)));
    assert_eq!(app.upload(fits.into()).await.status, StatusCode::CREATED);
}
