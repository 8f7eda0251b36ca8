//! Requests in llama.cpp's slots as turns of a session: their texts, concurrent requests, and those that are refused or
//! interrupted.

use std::sync::mpsc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, StatusCode};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};
use tidegate_server::engine::{EngineOptions, spawn};
use tidegate_server::session::{History, Location, Owner, SessionId, Store, StoreOptions, VersionId};
use tidegate_server::{ApiOptions, AppState};

use super::slots::{FOX, act, complete, forgetful, longer};
use crate::common::fake::{Fake, rules};
use crate::common::sessions::{App, app};
use crate::common::{get, send, served, text, with};

async fn sessions(app: &App) -> Vec<Value> {
    app.get("/v1/sessions").await.json()["data"].as_array().unwrap().clone()
}

async fn read(app: &App, session: &Value, what: &str) -> Value {
    let answer = app.get(&format!("/v1/sessions/{}/{what}", session["id"].as_str().unwrap())).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn content(answer: &Value) -> &str {
    answer["content"].as_str().unwrap()
}

/// Checks that the text of each version is exactly what its snapshot has read.
async fn agree(app: &App, session: &Value) {
    let id = SessionId::parse(session["id"].as_str().unwrap()).unwrap();
    for turn in read(app, session, "turns").await["data"].as_array().unwrap() {
        let name = turn["version"].as_str().unwrap();
        let found = read(app, session, &format!("tokens?version={name}")).await;
        assert_eq!(found["total"], turn["tokens"], "{turn}");
        let version = VersionId::parse(name);
        let snapshot = app.store.load(Owner::default(), &id, version.as_ref()).await.unwrap().1;
        let found: Vec<u32> = serde_json::from_value(found["tokens"].clone()).unwrap();
        let (state, pending) = found.split_at(snapshot.read as usize);
        assert_eq!(History::default().extended(state), snapshot.history, "{turn}");
        assert_eq!(pending, snapshot.pending, "{turn}");
    }
}

#[tokio::test]
async fn a_slot_keeps_its_text() {
    let app = forgetful().await;
    let first = complete(&app, 1, FOX, json!({})).await;
    let session = sessions(&app).await[0].clone();
    let mut told = format!("{FOX}{}", content(&first));
    assert_eq!(read(&app, &session, "text").await["text"], told);
    let next = complete(&app, 1, longer(&first), json!({})).await;
    assert!(next["timings"]["cache_n"].as_u64().unwrap() > 0);
    told = format!("{told} and then{}", content(&next));
    assert_eq!(read(&app, &session, "text").await["text"], told);
    let messages = read(&app, &session, "messages").await;
    let said: Vec<(&str, &str)> = messages["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|message| (message["role"].as_str().unwrap(), message["content"].as_str().unwrap()))
        .collect();
    let expected =
        [("user", FOX), ("assistant", content(&first)), ("user", " and then"), ("assistant", content(&next))];
    assert_eq!(said, expected);
    assert_eq!(act(&app, "1", "save", "fox").await.status, StatusCode::OK);

    // A prompt that does not begin with the slot's text replaces it.
    let other = complete(&app, 1, "In the morning", json!({})).await;
    assert_eq!(read(&app, &session, "text").await["text"], format!("In the morning{}", content(&other)));
    agree(&app, &session).await;
    assert_eq!(act(&app, "1", "restore", "fox").await.status, StatusCode::OK);
    assert_eq!(read(&app, &session, "text").await["text"], told);

    // A prompt that is first read without an answer, and then continued.
    let stop = json!({"stop": ["e"], "n_predict": 20});
    complete(&app, 2, FOX, json!({"n_predict": 0})).await;
    let next = complete(&app, 2, FOX, stop.clone()).await;
    let prepared = sessions(&app).await[0].clone();
    assert_eq!(read(&app, &prepared, "text").await["text"], format!("{FOX}{}", content(&next)));
    complete(&app, 2, format!("{FOX}{} said", content(&next)), stop).await;
    agree(&app, &prepared).await;
}

#[tokio::test]
async fn a_slot_stores_what_is_new_of_a_prompt() {
    let app = forgetful().await;
    let long = FOX.repeat(100);
    let first = complete(&app, 1, long.as_str(), json!({})).await;
    let stored = app.store.stats().text_bytes;
    let mut pieces = vec![json!(long)];
    pieces.extend(first["tokens"].as_array().unwrap().clone());
    pieces.push(json!(" and then"));
    complete(&app, 1, pieces, json!({})).await;
    let more = app.store.stats().text_bytes - stored;
    assert!(stored > 2000 && more < 400, "{stored} {more}");
}

#[tokio::test]
async fn two_first_requests_in_a_slot_come_one_after_the_other() {
    let app = forgetful().await;
    let wait = [("prefer", "wait=600")];
    let body = |prompt: &str| json!({"prompt": prompt, "n_predict": 2, "id_slot": 1});
    let ask = async |prompt: &str| app.send(Method::POST, "/completion", body(prompt), &wait).await;
    let (one, other) = tokio::join!(ask("A fox"), ask("A crow"));
    assert_eq!((one.status, other.status), (StatusCode::OK, StatusCode::OK), "{} {}", one.text(), other.text());
    let found = sessions(&app).await;
    assert_eq!(found.len(), 1);
    let turns = read(&app, &found[0], "turns").await;
    let kinds: Vec<&str> =
        turns["data"].as_array().unwrap().iter().map(|turn| turn["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["create", "turn", "turn"], "neither has replaced the other");
}

#[tokio::test]
async fn a_refused_request_leaves_no_slot() {
    let app = app().await;
    for (more, status) in [
        (json!({"temperature": 9}), 400),
        (json!({"stop": [""]}), 400),
        (json!({"prompt": "B"}), 200),
        (json!({"model": "other"}), 404),
    ] {
        let body = with(json!({"prompt": "A", "n_predict": 2, "id_slot": 5}), more);
        let answer = app.post("/completion", body.clone()).await;
        assert_eq!(answer.status.as_u16(), status, "{body}: {}", answer.text());
        assert_eq!(sessions(&app).await.len(), usize::from(status == 200), "{body}");
        app.post("/slots/5?action=erase", Value::Null).await;
    }
}

#[tokio::test]
async fn too_many_requests_that_wait_for_a_slot_are_refused() {
    let app = app().await;
    let long = json!({"prompt": FOX, "n_predict": 50_000, "id_slot": 1, "stream": true, "ignore_eos": true});
    let mut running = app.open("/completion", long, &[]).await;
    running.read_some().await;
    let ask = async || {
        let body = json!({"prompt": "A", "n_predict": 1, "id_slot": 1});
        app.send(Method::POST, "/completion", body, &[("prefer", "wait=600")]).await
    };
    // One owner may have at most 128 waiting requests.
    let mut asked: FuturesUnordered<_> = (0..129).map(|_| ask()).collect();
    let refused = asked.next().await.unwrap();
    assert_eq!(
        (refused.status, refused.json()["error"]["type"].as_str()),
        (StatusCode::TOO_MANY_REQUESTS, Some("rate_limit_error"))
    );
    assert_eq!(refused.param(), "prefer");
    assert!(refused.text().contains("128 of your requests already wait"), "{}", refused.text());
}

#[tokio::test]
async fn a_request_interrupted_in_the_queue_leaves_its_slot_as_it_is() {
    let (fake, limit) = (Fake::new(1), Duration::from_millis(200));
    let calls = fake.calls();
    let (engine, _thread) = spawn(fake, rules(), EngineOptions::default()).unwrap();
    let store = Store::open(StoreOptions::new(Location::Memory), served(engine.clone()).codec.clone()).await.unwrap();
    let [unlimited, limited] = [None, Some(limit)].map(|max_time| {
        let state = AppState::new(ApiOptions { max_time, ..ApiOptions::default() });
        state.set_store(store.clone());
        state.serve(served(engine.clone()));
        state
    });
    let ask = async |state: &AppState, body: Value| {
        let request = Request::post("/completion").header("content-type", "application/json");
        let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
        let version = response.headers().get("x-session-version").map(|value| value.to_str().unwrap().to_owned());
        let (status, text) = (response.status(), text(response).await);
        assert_eq!(status, StatusCode::OK, "{text}");
        (serde_json::from_str::<Value>(&text).unwrap(), version)
    };
    let head = async || {
        let found: Value = serde_json::from_str(&text(send(&limited, get("/v1/sessions")).await).await).unwrap();
        (found["data"][0]["version"].as_str().map(str::to_owned), found["data"][0]["tokens"].clone())
    };
    let in_slot = json!({"prompt": [10, 11], "n_predict": 3, "id_slot": 1, "ignore_eos": true});
    let (_, kept) = ask(&unlimited, in_slot.clone()).await;
    assert_eq!(head().await, (kept.clone(), json!(5)));

    // Another request holds the engine's only slot until it is released.
    let (release, released) = mpsc::channel::<()>();
    *calls.during_step.lock().unwrap() = Some(Box::new(move || _ = released.recv()));
    let holding = ask(&unlimited, json!({"prompt": [1], "n_predict": 2, "ignore_eos": true}));
    let waiting = async {
        while engine.stats().running == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        ask(&limited, with(in_slot, json!({"prompt": [20, 21]}))).await
    };
    let releasing = async {
        while engine.stats().waiting == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // This timer ends after the request's own on the same thread, so the request has been interrupted by then.
        tokio::time::sleep(2 * limit).await;
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        drop(release);
    };
    let (_, (interrupted, version), ()) = tokio::join!(holding, waiting, releasing);
    assert_eq!((&interrupted["tokens_predicted"], &interrupted["stop_type"]), (&json!(0), &json!("limit")));
    assert_eq!(version, kept, "the slot has the version that it had");
    assert_eq!(head().await, (kept, json!(5)));
}
