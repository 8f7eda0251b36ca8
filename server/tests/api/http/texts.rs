//! Reading conversations back: every token of every version, whichever operation added it.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::{History, Location, Owner, SessionId, StoreOptions, VersionId};

use crate::common::checkpoint;
use crate::common::sessions::{App, app, app_of, app_storing, app_with, prompt, session};
use crate::common::translator::{Translator, serving};
use crate::common::with;

async fn read(app: &App, id: &str, what: &str) -> Value {
    let answer = app.send(Method::GET, &format!("/v1/sessions/{id}/{what}"), Value::Null, &[]).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

async fn text(app: &App, id: &str) -> String {
    read(app, id, "text").await["text"].as_str().unwrap().to_owned()
}

async fn tokens(app: &App, id: &str) -> Vec<u32> {
    serde_json::from_value(read(app, id, "tokens").await["tokens"].clone()).unwrap()
}

/// Runs a greedy turn and returns the text that its client sees.
async fn say(app: &App, id: &str, text: &str, more: Value) -> String {
    let body = with(prompt(text, json!({"session": id})), more);
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Checks that the text of each version is exactly what its snapshot has read.
async fn agree(app: &App, id: &str) {
    let session = SessionId::parse(id).unwrap();
    for turn in read(app, id, "turns").await["data"].as_array().unwrap() {
        let name = turn["version"].as_str().unwrap();
        let found = read(app, id, &format!("tokens?version={name}")).await;
        assert_eq!(found["version"], name);
        assert_eq!(found["total"], turn["tokens"], "{turn}");
        if turn["kept"] == false {
            continue;
        }
        let version = VersionId::parse(name);
        let snapshot = app.store.load(Owner::default(), &session, version.as_ref()).await.unwrap().1;
        let found: Vec<u32> = serde_json::from_value(found["tokens"].clone()).unwrap();
        let (state, pending) = found.split_at(snapshot.read as usize);
        assert_eq!(History::default().extended(state), snapshot.history, "{turn}");
        assert_eq!(pending, snapshot.pending, "{turn}");
    }
}

#[tokio::test]
async fn a_text_is_what_the_client_saw() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once upon a time"})).await["id"].as_str().unwrap().to_owned();
    let mut told = "Once upon a time".to_owned();
    assert_eq!(text(&app, &id).await, told);
    for (line, more) in [
        (" there was", json!({})),
        (" and then", json!({"max_tokens": 1})),
        // Without new text, the answer continues.
        ("", json!({"prompt": null})),
        (" The fox", json!({"stop": ["e"], "max_tokens": 40})),
        (" said", json!({"stop": [" a", "the", "o"], "max_tokens": 40})),
        (" again", json!({"temperature": 2, "seed": 3, "stop": ["s"]})),
    ] {
        let answer = say(&app, &id, line, more).await;
        told += line;
        told += &answer;
        assert_eq!(text(&app, &id).await, told);
        agree(&app, &id).await;
    }
    app.post(&format!("/v1/sessions/{id}/append"), json!({"text": " The end."})).await;
    told += " The end.";
    assert_eq!(text(&app, &id).await, told);
    agree(&app, &id).await;
    let all = read(&app, &id, "text").await;
    let total = all["total"].as_u64().unwrap();
    assert_eq!((&all["object"], &all["id"], &all["start"]), (&json!("session.text"), &json!(id), &json!(0)));
    assert_eq!(all["end"], total);
    let pieces = [format!("text?end={}", total / 2), format!("text?start={}", total / 2)];
    let mut joined = String::new();
    for piece in &pieces {
        joined += read(&app, &id, piece).await["text"].as_str().unwrap();
    }
    assert_eq!(joined, told);
}

#[tokio::test]
async fn text_that_is_held_back_belongs_to_the_text_until_a_stop_string_takes_it() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once upon a time there"})).await["id"].as_str().unwrap().to_owned();
    let whole = say(&app, &id, " was", json!({"max_tokens": 24})).await;
    // The stop string is the beginning of the answer, so its tokens are held back one after the other.
    let other = session(&app, json!({"text": "Once upon a time there"})).await["id"].as_str().unwrap().to_owned();
    let stop = &whole[..whole.char_indices().nth(whole.chars().count() / 2).unwrap().0];
    let first = app
        .post("/v1/completions", prompt(" was", json!({"session": other, "stop": [stop], "max_tokens": 1})))
        .await
        .json();
    let held = first["session"]["held_text"].as_str().unwrap();
    assert!(!held.is_empty(), "{first}");
    assert_eq!(text(&app, &other).await, format!("Once upon a time there was{held}"));
    agree(&app, &other).await;
    let more = json!({"prompt": null, "stop": [stop], "max_tokens": 1});
    say(&app, &other, "", more).await;
    agree(&app, &other).await;
    let rest = say(&app, &other, "", json!({"prompt": null, "stop": [stop], "max_tokens": 24})).await;
    assert_eq!(rest, "");
    assert_eq!(text(&app, &other).await, "Once upon a time there was");
    agree(&app, &other).await;
}

#[tokio::test]
async fn text_is_held_back_at_the_end_only_where_a_next_turn_can_show_it() {
    let app = app_with(b"0123456789abcdef0123456789abcdef").await;
    let begun = app.post("/v1/completions", prompt("Once upon a time", json!({"return_state": true}))).await.json();
    let made = session(&app, json!({"text": "Once upon a time"})).await;
    let (by_state, by_session) = (json!({"state": begun["state"]}), json!({"session": made["id"]}));
    for (start, keeps_nothing, keeps) in [
        (by_state, json!({}), json!({"return_state": true})),
        (by_session, json!({"keep": "none"}), json!({"keep": "best"})),
    ] {
        let say = async |more: Value| {
            let answer = app.post("/v1/completions", prompt(" The", with(start.clone(), more))).await.json();
            answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
        };
        let whole = say(keeps_nothing.clone()).await;
        // All of the answer may be the beginning of this stop string.
        let stop = json!({"stop": [format!("{whole}~")]});
        assert_eq!(say(with(keeps_nothing, stop.clone())).await, whole);
        assert_eq!(say(with(keeps, stop)).await, "");
    }
}

#[tokio::test]
async fn forks_rewinds_and_chats_have_their_texts() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once"})).await["id"].as_str().unwrap().to_owned();
    say(&app, &id, " upon", json!({})).await;
    let middle = read(&app, &id, "turns").await["data"][1]["version"].as_str().unwrap().to_owned();
    let told = text(&app, &id).await;
    say(&app, &id, " later", json!({})).await;
    let fork = app.post(&format!("/v1/sessions/{id}/fork"), json!({"version": middle})).await.json();
    let fork = fork["data"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(text(&app, &fork).await, told);
    app.post(&format!("/v1/sessions/{id}/rewind"), json!({"version": middle})).await;
    assert_eq!(text(&app, &id).await, told);
    say(&app, &id, " elsewhere", json!({})).await;
    agree(&app, &id).await;
    say(&app, &fork, " here", json!({})).await;
    agree(&app, &fork).await;
    let whole = tokens(&app, &fork).await;
    app.send(Method::DELETE, &format!("/v1/sessions/{id}"), Value::Null, &[]).await;
    assert_eq!(tokens(&app, &fork).await, whole);

    let chat = session(&app, json!({})).await["id"].as_str().unwrap().to_owned();
    assert_eq!(text(&app, &chat).await, "");
    for question in ["Tell me of a fox.", "And of a crow?"] {
        let message = json!([{"role": "user", "content": question}]);
        let body = json!({"session": chat, "messages": message, "max_tokens": 8, "temperature": 0});
        let answer = app.post("/v1/chat/completions", body).await.json();
        let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let found = text(&app, &chat).await;
        assert!(found.contains(question) && found.ends_with(content), "{found:?} {content:?}");
    }
    agree(&app, &chat).await;
}

#[tokio::test]
async fn wrong_ranges_versions_and_owners_are_refused_by_name() {
    let app = app().await;
    let id = session(&app, json!({"text": "Once upon a time"})).await["id"].as_str().unwrap().to_owned();
    let total = read(&app, &id, "tokens").await["total"].as_u64().unwrap();
    let other = session(&app, json!({"text": "Another"})).await;
    let get = async |path: String| app.send(Method::GET, &format!("/v1/sessions/{path}"), Value::Null, &[]).await;
    for what in ["text", "tokens"] {
        for (query, param, limit) in [
            (format!("start={}", total + 1), "start", format!("from 0 to {total}")),
            (format!("end={}", total + 1), "end", format!("from 0 to {total}")),
            ("start=2&end=1".to_owned(), "end", format!("from 2 to {total}")),
        ] {
            let answer = get(format!("{id}/{what}?{query}")).await;
            assert_eq!((answer.status, answer.param().as_str()), (StatusCode::BAD_REQUEST, param), "{}", answer.text());
            assert!(answer.text().contains(&limit), "{}", answer.text());
        }
        let negative = get(format!("{id}/{what}?start=-1")).await;
        assert_eq!(negative.status, StatusCode::BAD_REQUEST);
        assert!(negative.text().contains("start"), "{}", negative.text());
        let unknown = get(format!("{id}/{what}?begin=1")).await;
        assert_eq!(unknown.status, StatusCode::BAD_REQUEST);
        let foreign = get(format!("{id}/{what}?version={}", other["version"].as_str().unwrap())).await;
        assert_eq!((foreign.status, foreign.param().as_str()), (StatusCode::NOT_FOUND, "version"));
        let path = format!("/v1/sessions/{id}/{what}");
        let stranger = app.send(Method::GET, &path, Value::Null, &[("authorization", "Bearer other")]).await;
        let missing = get(format!("ses_{}/{what}", "0".repeat(32))).await;
        assert_eq!(stranger.status, StatusCode::NOT_FOUND);
        assert_eq!(stranger.text(), missing.text());
    }
}

#[tokio::test]
async fn a_server_without_texts_says_that_they_are_not_kept() {
    let options = StoreOptions { keep_text: false, ..StoreOptions::new(Location::Memory) };
    let app = app_storing(open(&checkpoint(), &OpenOptions::default()).unwrap().0, options).await;
    let id = session(&app, json!({"text": "Once"})).await["id"].as_str().unwrap().to_owned();
    say(&app, &id, " upon", json!({})).await;
    for what in ["text", "tokens"] {
        let answer = app.send(Method::GET, &format!("/v1/sessions/{id}/{what}"), Value::Null, &[]).await;
        assert_eq!((answer.status, answer.code().as_str()), (StatusCode::NOT_FOUND, "text_not_kept"));
        assert!(answer.text().contains("--keep-text"), "{}", answer.text());
    }
}

#[tokio::test]
async fn a_translation_has_its_last_source_and_its_text() {
    let (served, _) = serving(Translator::new(4, std::time::Duration::ZERO));
    let app = app_of(served, Location::Memory).await;
    let id = session(&app, json!({})).await["id"].as_str().unwrap().to_owned();
    let turn = async |prompt: Value| {
        let body =
            json!({"session": id, "prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": true});
        let answer = app.post("/v1/completions", body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        let answer = answer.json();
        let ids: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
        (ids, answer["session"]["tokens"].as_u64().unwrap())
    };
    for source in ["Das alte Haus steht am Meer.", "Der Fuchs sprach zum Hasen."] {
        let (ids, total) = turn(json!(source)).await;
        let (more, after) = turn(Value::Null).await;
        let found = tokens(&app, &id).await;
        assert_eq!(found.len() as u64, after);
        assert!(total < after);
        assert!(found.ends_with(&[ids, more].concat()), "{found:?}");
        assert!(text(&app, &id).await.starts_with(source));
    }
}
