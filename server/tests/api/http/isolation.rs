//! Isolation of two owners: on no route can one see the other's sessions, versions, streams, prefixes, keys or states, or
//! notice that they exist.

use crate::common::sessions::{Answer, App, app, app_from, app_with, state_of};
use axum::body::Bytes;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::OpenOptions;

const ANN: (&str, &str) = ("authorization", "Bearer ann's token");
const BEN: (&str, &str) = ("authorization", "Bearer ben's token");

/// A client without a credential.
const NOBODY: (&str, &str) = ("accept", "*/*");

const CANARY: &str = "The password of the old vault is Vermilion-Ostrich-7731.";

async fn ask(app: &App, owner: (&str, &str), method: Method, path: &str, body: Value) -> Answer {
    app.send(method, path, body, &[owner]).await
}

/// Sends a request that must succeed, and returns its answer.
async fn get_from(app: &App, owner: (&str, &str), method: Method, path: &str, body: Value) -> Value {
    let answer = ask(app, owner, method.clone(), path, body).await;
    assert!(answer.status.is_success(), "{method} {path}: {} {}", answer.status, answer.text());
    answer.json()
}

async fn post(app: &App, owner: (&str, &str), path: &str, body: Value) -> Value {
    get_from(app, owner, Method::POST, path, body).await
}

fn id(session: &Value) -> &str {
    session["id"].as_str().unwrap()
}

fn turn(session: &str, text: &str) -> Value {
    json!({"session": session, "prompt": text, "max_tokens": 8, "temperature": 0.9, "return_token_ids": true})
}

async fn bytes(app: &App, owner: (&str, &str), session: &str) -> Bytes {
    let answer = ask(app, owner, Method::GET, &format!("/v1/sessions/{session}/snapshot"), Value::Null).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.body
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Returns every request that names a session, a version or a stream. `own` is a session of the requester.
fn requests(session: &str, version: &str, stream: &str, own: &str) -> Vec<(Method, String, Value)> {
    let path = format!("/v1/sessions/{session}");
    let mine = format!("/v1/sessions/{own}");
    let chat = json!({"session": session, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1});
    vec![
        (Method::GET, path.clone(), Value::Null),
        (Method::PATCH, path.clone(), json!({"metadata": {"seen": "yes"}, "ttl_seconds": 1})),
        (Method::GET, format!("{path}/turns"), Value::Null),
        (Method::GET, format!("{path}/snapshot"), Value::Null),
        (Method::GET, format!("{path}/snapshot?version={version}"), Value::Null),
        (Method::POST, format!("{path}/append"), json!({"text": " more"})),
        (Method::POST, format!("{path}/fork"), json!({})),
        (Method::POST, format!("{path}/fork"), json!({"version": version})),
        (Method::POST, format!("{path}/rewind"), json!({"version": version})),
        (Method::POST, "/v1/completions".into(), turn(session, " more")),
        (Method::POST, "/v1/completions".into(), crate::common::with(turn(session, " more"), json!({"stream": true}))),
        (Method::POST, "/v1/chat/completions".into(), chat),
        (Method::POST, "/v1/sessions".into(), json!({"version": version})),
        (Method::GET, format!("/v1/sessions?after={session}"), Value::Null),
        (Method::GET, format!("{mine}/snapshot?version={version}"), Value::Null),
        (Method::POST, format!("{mine}/fork"), json!({"version": version})),
        (Method::POST, format!("{mine}/rewind"), json!({"version": version})),
        (Method::GET, format!("/v1/streams/{stream}"), Value::Null),
        (Method::DELETE, format!("/v1/streams/{stream}"), Value::Null),
        (Method::DELETE, path, Value::Null),
    ]
}

#[tokio::test]
async fn other_owners_sessions_look_like_missing_ones() {
    let app = app().await;
    let anns = post(&app, ANN, "/v1/sessions", json!({"text": CANARY, "metadata": {"name": CANARY}})).await;
    let version = anns["version"].as_str().unwrap().to_owned();
    let body = crate::common::with(turn(id(&anns), " And"), json!({"stream": true, "on_disconnect": "continue"}));
    let stream = app.send(Method::POST, "/v1/completions", body, &[ANN]).await;
    assert_eq!(stream.status, StatusCode::OK);
    let stream = stream.header("x-stream-id");
    assert!(ask(&app, ANN, Method::GET, &format!("/v1/streams/{stream}"), Value::Null).await.status.is_success());

    let path = format!("/v1/sessions/{}", id(&anns));
    let before = get_from(&app, ANN, Method::GET, &path, Value::Null).await;
    let turns = get_from(&app, ANN, Method::GET, &format!("{path}/turns"), Value::Null).await;
    let never = "02468ace13579bdf".repeat(2);
    for owner in [BEN, NOBODY] {
        let own = post(&app, owner, "/v1/sessions", json!({"text": "Once"})).await;
        let there = requests(id(&anns), &version, &stream, id(&own));
        let not = requests(&format!("ses_{never}"), &format!("ver_{never}"), &format!("strm_{never}"), id(&own));
        for ((method, path, body), (_, other_path, other_body)) in there.into_iter().zip(not) {
            let found = ask(&app, owner, method.clone(), &path, body).await;
            let missed = ask(&app, owner, method.clone(), &other_path, other_body).await;
            assert_eq!(found.status, StatusCode::NOT_FOUND, "{owner:?} {method} {path}: {}", found.text());
            assert_eq!((found.status, found.text()), (missed.status, missed.text()), "{method} {path}");
        }
        let list = get_from(&app, owner, Method::GET, "/v1/sessions?limit=100", Value::Null).await;
        assert_eq!(list["data"].as_array().unwrap().len(), 1);
        assert_eq!(list["data"][0]["id"], own["id"]);
        assert!(!list.to_string().contains("Vermilion"));
    }
    assert_eq!(get_from(&app, ANN, Method::GET, &path, Value::Null).await, before);
    assert_eq!(get_from(&app, ANN, Method::GET, &format!("{path}/turns"), Value::Null).await, turns);
    assert_eq!(get_from(&app, ANN, Method::DELETE, &path, Value::Null).await["deleted"], true);
}

#[tokio::test]
async fn prefixes_are_not_shared_between_owners() {
    let app = app().await;
    let prompt = |more: &str| json!({"prompt": format!("{CANARY}{more}"), "max_tokens": 4, "temperature": 0});
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let first = post(&app, ANN, "/v1/completions", prompt("")).await;
    assert_eq!(cached(&first), 0);
    let again = post(&app, ANN, "/v1/completions", prompt(" Go on")).await;
    assert!(cached(&again) > 0, "{again}");
    for owner in [BEN, NOBODY] {
        assert_eq!(cached(&post(&app, owner, "/v1/completions", prompt(" Go on")).await), 0, "{owner:?}");
    }
    // A prefix that the same owner computed is used.
    assert!(cached(&post(&app, BEN, "/v1/completions", prompt(" Go on, now")).await) > 0);
}

#[tokio::test]
async fn an_uploaded_snapshot_is_an_independent_copy() {
    let app = app().await;
    let anns = post(&app, ANN, "/v1/sessions", json!({"text": "Once upon a time", "seed": 5})).await;
    let head = bytes(&app, ANN, id(&anns)).await;
    let octets = ("content-type", "application/octet-stream");
    let uploaded = app.raw(Method::POST, "/v1/snapshots", head.clone().into(), &[octets, BEN]).await;
    assert_eq!(uploaded.status, StatusCode::CREATED);
    let bens = uploaded.json();
    assert_ne!((&bens["id"], &bens["version"]), (&anns["id"], &anns["version"]));
    assert_eq!((&bens["forked_from"], &bens["parent"]), (&Value::Null, &Value::Null));
    let answer = post(&app, BEN, "/v1/completions", turn(id(&bens), " there was")).await;
    assert_eq!(bytes(&app, ANN, id(&anns)).await, head, "what Ben does to his copy is nothing to Ann");
    let same = post(&app, ANN, "/v1/completions", turn(id(&anns), " there was")).await;
    assert_eq!(same["choices"][0]["token_ids"], answer["choices"][0]["token_ids"]);
    let bens_head = bytes(&app, BEN, id(&bens)).await;
    get_from(&app, ANN, Method::DELETE, &format!("/v1/sessions/{}", id(&anns)), Value::Null).await;
    assert_eq!(bytes(&app, BEN, id(&bens)).await, bens_head, "nor is what Ann does to hers");
}

#[tokio::test]
async fn an_idempotency_key_belongs_to_one_owner() {
    let app = app().await;
    let say = async |owner, body| {
        let key = ("idempotency-key", "one-and-the-same");
        app.send(Method::POST, "/v1/completions", body, &[owner, key]).await
    };
    let body = json!({"prompt": CANARY, "max_tokens": 2});
    let anns = say(ANN, body.clone()).await;
    assert_eq!(say(ANN, body.clone()).await.json()["id"], anns.json()["id"], "sent again");
    let other = say(BEN, json!({"prompt": "Once", "max_tokens": 2})).await;
    assert_eq!(other.status, StatusCode::OK, "another request under the same key: {}", other.text());
    assert_ne!(say(NOBODY, body).await.json()["id"], anns.json()["id"]);
}

#[tokio::test]
async fn a_sealed_state_opens_only_for_its_owner() {
    let app = app_with(&[7; 32]).await;
    let sealed = post(&app, ANN, "/v1/completions", json!({"prompt": CANARY, "max_tokens": 2, "return_state": true}));
    let sealed = sealed.await["state"].clone();
    let body = json!({"prompt": " And", "max_tokens": 2, "state": sealed});
    let own = ask(&app, ANN, Method::POST, "/v1/completions", body.clone()).await;
    assert_eq!(own.status, StatusCode::OK, "{}", own.text());
    for owner in [BEN, NOBODY] {
        let refused = ask(&app, owner, Method::POST, "/v1/completions", body.clone()).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "state".into()));
    }
}

/// Sends Ben's requests and returns their results: texts, token ids and snapshot states, without the server's ids.
async fn bens_day(app: &App) -> (Vec<Value>, Vec<Bytes>) {
    let (mut told, mut states) = (Vec::new(), Vec::new());
    let made = post(app, BEN, "/v1/sessions", json!({"text": "The fox said", "seed": 3})).await;
    for text in [" to the hare", "", " The hare said"] {
        told.push(post(app, BEN, "/v1/completions", turn(id(&made), text)).await["choices"][0]["token_ids"].clone());
        states.push(state_of(&bytes(app, BEN, id(&made)).await));
    }
    let plain = json!({"prompt": "The password of the", "max_tokens": 16, "temperature": 0, "return_token_ids": true});
    let plain = post(app, BEN, "/v1/completions", plain).await;
    told.extend([plain["choices"][0]["text"].clone(), plain["choices"][0]["token_ids"].clone()]);
    (told, states)
}

#[tokio::test]
async fn a_reused_slot_reveals_nothing_of_its_previous_owner() {
    let one_slot = || OpenOptions { slots: 1, ..OpenOptions::default() };
    let fresh = bens_day(&app_from(one_slot()).await).await;

    let app = app_from(one_slot()).await;
    let anns = post(&app, ANN, "/v1/sessions", json!({"text": CANARY})).await;
    let mut seen = vec![bens_day(&app).await];
    post(&app, ANN, "/v1/completions", turn(id(&anns), CANARY)).await;
    seen.push(bens_day(&app).await);
    // An interrupted turn leaves its state in the slot.
    let endless = json!({
        "session": id(&anns), "prompt": CANARY, "max_tokens": 100_000, "ignore_eos": true, "stream": true
    });
    let mut open = app.open("/v1/completions", endless, &[ANN]).await;
    open.read_some().await;
    drop(open);
    app.until_free_for(&format!("/v1/sessions/{}", id(&anns)), &[ANN]).await;
    seen.push(bens_day(&app).await);
    for (told, states) in seen {
        assert_eq!(told, fresh.0);
        assert!(states == fresh.1, "not the bytes of a server that has never seen Ann");
        assert!(!states.iter().any(|state| holds(state, "Vermilion")));
        assert!(!told.iter().any(|told| told.to_string().contains("Vermilion")));
    }
}
