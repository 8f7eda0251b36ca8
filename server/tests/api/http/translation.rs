//! Translation over HTTP: prompts as sources, conversations with several sources, and invalid requests.

use std::time::Duration;

use crate::common::sessions::{App, app_of, session};
use crate::common::translator::{Call, LONGEST, Translator, serving, translation};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_server::Served;
use tidegate_server::session::{Codec, Keys, Location};

/// Returns a server with the scripted model, and the calls to the model.
async fn app(place: Location) -> (App, std::sync::Arc<std::sync::Mutex<Vec<Call>>>) {
    let (served, did) = serving(Translator::new(4, Duration::ZERO));
    (app_of(served, place).await, did)
}

fn body(prompt: &Value, more: Value) -> Value {
    crate::common::with(json!({"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": true}), more)
}

async fn asked(app: &App, prompt: &Value, more: Value) -> Value {
    let answer = app.post("/v1/completions", body(prompt, more)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn ids(answer: &Value) -> Vec<u32> {
    ids_of(&answer["choices"][0])
}

fn ids_of(choice: &Value) -> Vec<u32> {
    choice["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Returns the ids of a source, including the special token at its beginning.
async fn source(app: &App, text: &str) -> Vec<u32> {
    let tokens = app.post("/tokenize", json!({"prompt": text})).await.json()["tokens"].clone();
    serde_json::from_value(tokens).unwrap()
}

const ONE: &str = "Das alte Haus steht am Meer.";
const OTHER: &str = "Der Fuchs sprach zum Hasen.";

#[tokio::test]
async fn a_prompt_is_a_source_and_the_answer_only_its_translation() {
    let (app, did) = app(Location::Memory).await;
    let [one, other] = [source(&app, ONE).await, source(&app, OTHER).await];
    let answer = asked(&app, &json!(ONE), json!({})).await;
    assert_eq!(ids(&answer), translation(&one, 6));
    assert_eq!(answer["usage"]["prompt_tokens"], one.len());
    assert_eq!(ids(&asked(&app, &json!(one), json!({})).await), translation(&one, 6), "as ids");
    let several = asked(&app, &json!([ONE, OTHER]), json!({"n": 3, "logprobs": 0})).await;
    let choices = several["choices"].as_array().unwrap();
    for (at, choice) in choices.iter().enumerate() {
        assert_eq!(ids_of(choice), translation([&one, &other][at / 3], 6));
        assert_eq!(choice["logprobs"]["text_offset"][0], 0, "nothing stands before it");
    }
    let best = asked(&app, &json!(ONE), json!({"best_of": 4})).await;
    assert_eq!(ids(&best), translation(&one, 6));
    let read = did.lock().unwrap().iter().filter(|did| matches!(did, Call::Source(_))).count();
    assert_eq!(read, 5, "once for each prompt of a request");

    let llama = app.post("/completion", json!({"prompt": ONE, "n_predict": 6, "temperature": 0})).await.json();
    assert_eq!(llama["content"], answer["choices"][0]["text"]);
}

#[tokio::test]
async fn parameters_that_do_not_apply_to_sources_are_refused_by_name() {
    let (app, did) = app(Location::Memory).await;
    let cases = [
        ("/v1/completions", body(&json!(ONE), json!({"echo": true})), "echo", "the prompt is a source"),
        (
            "/v1/completions",
            body(&json!(vec![5; LONGEST + 1]), json!({})),
            "prompt",
            "1 to 2000 tokens long, found 2001",
        ),
        ("/v1/completions", body(&json!(Value::Null), json!({})), "prompt", "must be given"),
        ("/v1/completions", body(&json!(ONE), json!({"suffix": "x"})), "suffix", "must be absent"),
        ("/v1/completions", body(&json!(ONE), json!({"prompt_logprobs": 1})), "prompt_logprobs", "not supported"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": ONE}]}),
            "messages",
            "it takes no messages",
        ),
        ("/v1/chat/completions", json!({"messages": []}), "messages", "it takes no messages"),
        ("/v1/responses", json!({"input": ONE}), "input", "it takes no messages"),
        ("/apply-template", json!({"messages": []}), "messages", "it takes no messages"),
        (
            "/apply-template",
            json!({"messages": [{"role": "user", "content": ONE}]}),
            "messages",
            "it takes no messages",
        ),
        ("/tokenize", json!({"messages": []}), "messages", "it takes no messages"),
        ("/v1/sessions", json!({"messages": []}), "messages", "it takes no messages"),
        ("/v1/sessions", json!({"text": ""}), "text", "must not be empty"),
        ("/v1/sessions", json!({"messages": [{"role": "user", "content": ONE}]}), "messages", "it takes no messages"),
        ("/v1/sessions", json!({"tokens": vec![5; LONGEST + 1]}), "tokens", "2000 tokens long, found 2001"),
    ];
    for (path, body, param, words) in cases {
        let answer = app.post(path, body).await;
        assert_eq!((answer.status, answer.param()), (StatusCode::BAD_REQUEST, param.to_owned()), "{}", answer.text());
        assert!(answer.text().contains(words), "{param}: {}", answer.text());
    }
    for messages in [json!([]), json!([{"role": "user", "content": ONE}])] {
        let body = json!({"model": "fake", "max_tokens": 5, "messages": messages});
        let answer = app.post("/v1/messages", body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST);
        assert!(answer.text().contains("it takes no messages"), "{}", answer.text());
    }
    assert!(did.lock().unwrap().is_empty(), "nothing is read for them");
}

#[tokio::test]
async fn models_state_that_they_read_sources() {
    let (app, _) = app(Location::Memory).await;
    assert_eq!(app.get("/v1/models").await.json()["data"][0]["max_source_tokens"], LONGEST);
    // Texts that are not sources are limited by the operator's settings.
    for (tokens, status) in [(10_000, StatusCode::OK), (10_001, StatusCode::BAD_REQUEST)] {
        assert_eq!(app.post("/detokenize", json!({"tokens": vec![500; tokens]})).await.status, status);
    }
    let whole = LONGEST + 100_000;
    assert_eq!(app.post("/tokenize", json!({"prompt": ONE})).await.json()["max_model_len"], whole);
    assert_eq!(app.get("/props").await.json()["default_generation_settings"]["n_ctx"], whole);
    assert_eq!(app.get("/slots").await.json()[0]["n_ctx"], whole);
    assert_eq!(
        crate::common::sessions::app().await.get("/v1/models").await.json()["data"][0].get("max_source_tokens"),
        None
    );
}

#[tokio::test]
async fn a_conversation_has_one_source_at_a_time_and_can_be_rewound_to_any() {
    let folder = TempDir::new().unwrap();
    let place = || Location::Folder(folder.path().to_owned());
    let (first, _) = app(place()).await;
    let [one, other] = [source(&first, ONE).await, source(&first, OTHER).await];
    let made = session(&first, json!({"seed": 3})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let of = |id: &Value| json!({"session": id});
    let begun = asked(&first, &json!(ONE), of(&made["id"])).await;
    assert_eq!(ids(&begun), translation(&one, 6));
    let info = &begun["session"];
    assert_eq!((&info["restored"], &info["recomputed_tokens"]), (&json!(false), &json!(0)));
    // The source, the token that begins every translation, and the 6 generated tokens.
    assert_eq!(info["tokens"], one.len() + 1 + 6);
    first.store.close().await.unwrap();
    drop(first);

    let (app, did) = app(place()).await;
    let gone_on = asked(&app, &json!(""), of(&made["id"])).await;
    assert_eq!(ids(&gone_on), translation(&one, 12)[6..]);
    let session_of = &gone_on["session"];
    assert_eq!((&session_of["restored"], &session_of["tier"]), (&json!(true), &json!("disk")));
    assert!(!did.lock().unwrap().iter().any(|did| matches!(did, Call::Source(_))), "its source is in the state");

    let forks = app.post(&format!("{path}/fork"), json!({"n": 2})).await.json();
    let turned = asked(&app, &json!(OTHER), of(&made["id"])).await;
    assert_eq!(ids(&turned), translation(&other, 6), "a new source replaces the old one completely");
    let session_of = &turned["session"];
    assert_eq!((&session_of["restored"], &session_of["tokens"]), (&json!(false), &json!(other.len() + 7)));
    for fork in forks["data"].as_array().unwrap() {
        assert_eq!(ids(&asked(&app, &Value::Null, of(&fork["id"])).await), translation(&one, 18)[12..]);
    }
    let back = app.post(&format!("{path}/rewind"), json!({"version": gone_on["session"]["version"]})).await;
    assert_eq!(back.status, StatusCode::OK, "{}", back.text());
    assert_eq!(ids(&asked(&app, &json!(""), of(&made["id"])).await), translation(&one, 18)[12..]);

    // A source is appended now and translated later; another one replaces it.
    let read = session(&app, json!({"text": ONE})).await;
    assert_eq!(read["tokens"], one.len() + 1);
    assert_eq!(ids(&asked(&app, &Value::Null, of(&read["id"])).await), translation(&one, 6));
    let appended =
        app.post(&format!("/v1/sessions/{}/append", read["id"].as_str().unwrap()), json!({"text": OTHER})).await;
    assert_eq!(appended.json()["appended_tokens"], other.len(), "{}", appended.text());
    assert_eq!(ids(&asked(&app, &Value::Null, of(&read["id"])).await), translation(&other, 6));

    // A conversation without a source has nothing to translate.
    let empty = session(&app, json!({})).await;
    for prompt in [Value::Null, json!([]), json!("")] {
        let refused = app.post("/v1/completions", body(&prompt, of(&empty["id"]))).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "prompt".into()), "{}", refused.text());
    }
    assert_eq!(app.send(Method::GET, &path, Value::Null, &[]).await.status, StatusCode::OK);
    // Empty messages are refused, although a chat could continue without new messages.
    for more in [json!({}), json!({"messages": []})] {
        let body = crate::common::with(json!({"session": made["id"]}), more);
        let refused = app.post("/v1/chat/completions", body).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "messages".into()));
        assert!(refused.text().contains("it takes no messages"), "{}", refused.text());
    }
    let appended = app.post(&format!("{path}/append"), json!({"messages": []})).await;
    assert!(appended.text().contains("it takes no messages"), "{}", appended.text());
}

#[tokio::test]
async fn a_state_kept_by_the_client_contains_its_source() {
    let (served, did) = serving(Translator::new(4, Duration::ZERO));
    let codec = Codec { keys: Some(Keys::new(&[7; 32]).unwrap()), ..(*served.codec).clone() };
    let app = app_of(Served { codec: codec.into(), ..served }, Location::Memory).await;
    let [one, other] = [source(&app, ONE).await, source(&app, OTHER).await];
    let refused = app.post("/v1/completions", body(&json!(""), json!({"return_state": true}))).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "prompt".into()), "{}", refused.text());
    let first = asked(&app, &json!(ONE), json!({"return_state": true})).await;
    assert_eq!(ids(&first), translation(&one, 6));
    let state = &first["state"];
    let second = asked(&app, &json!(""), json!({"state": state, "return_state": true})).await;
    assert_eq!(ids(&second), translation(&one, 12)[6..]);
    assert_eq!(ids(&asked(&app, &Value::Null, json!({"state": second["state"]})).await), translation(&one, 18)[12..]);
    assert_eq!(ids(&asked(&app, &json!(OTHER), json!({"state": state})).await), translation(&other, 6));
    let read = did.lock().unwrap().iter().filter(|did| matches!(did, Call::Source(_))).count();
    assert_eq!(read, 2, "each source once");
}
