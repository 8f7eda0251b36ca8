//! Work that is ended from outside: by the client, or because its session, its key or the server goes away.

use std::io::Write;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::api::Keys;

use crate::common::sessions::{App, Open, app, prompt, session};

const KEY: &str = "sk-stopped-0123456789";
const OTHER: &str = "sk-other-0123456789";

/// Starts a turn that would take hours.
async fn endless(app: &App, id: &Value, policy: &str, headers: &[(&str, &str)]) -> Open {
    let body =
        json!({"session": id, "max_tokens": 500_000, "stream": true, "ignore_eos": true, "on_disconnect": policy});
    let mut running = app.open("/v1/completions", crate::common::with(prompt("A", json!({})), body), headers).await;
    running.read_some().await;
    running
}

/// Reads a stream to its end.
async fn rest(running: &mut Open) -> String {
    let mut text = String::new();
    while let Some(piece) = running.next().await {
        text += &piece;
    }
    text
}

/// Waits until the engine runs nothing.
async fn until_idle(app: &App) {
    for _ in 0..2000 {
        if app.engine_stats().running == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("still running: {:?}", app.engine_stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_stream_ends_its_turn_with_the_text_so_far() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let mut running = endless(&app, &made["id"], "continue", &[]).await;
    let stream = format!("/v1/streams/{}", running.header("x-stream-id"));
    let theirs = app.send(Method::DELETE, &stream, Value::Null, &[("authorization", "Bearer b")]).await;
    assert_eq!((theirs.status, theirs.code().as_str()), (StatusCode::NOT_FOUND, "not_found"));
    assert_eq!(app.engine_stats().running, 1);
    let ended = app.send(Method::DELETE, &stream, Value::Null, &[]).await;
    assert_eq!((ended.status, ended.text().as_str()), (StatusCode::NO_CONTENT, ""));
    let last = rest(&mut running).await;
    assert!(last.ends_with("[DONE]\n\n") && last.contains("\"version\""), "its reader learns of the new version");
    let after = app.until_free(&path).await;
    assert!(after["tokens"].as_u64().unwrap() > 0);
    let turns = app.get(&format!("{path}/turns")).await.json();
    assert_eq!(turns["data"][1]["kind"], "interrupted", "{turns}");
    for method in [Method::GET, Method::DELETE] {
        assert_eq!(app.send(method, &stream, Value::Null, &[]).await.status, StatusCode::NOT_FOUND);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_session_ends_its_turn() {
    let app = app().await;
    for policy in ["rollback", "commit", "continue"] {
        let (made, kept) = (session(&app, json!({})).await, session(&app, json!({})).await);
        let mut running = endless(&app, &made["id"], policy, &[]).await;
        let other = endless(&app, &kept["id"], policy, &[]).await;
        let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
        assert_eq!(app.send(Method::DELETE, &path, Value::Null, &[]).await.status, StatusCode::OK);
        let last = rest(&mut running).await;
        assert!(last.contains("\"session_deleted\"") && !last.contains("[DONE]"), "{policy}: {last}");
        assert_eq!(app.engine_stats().finished, 0, "{policy}: it was not committed");
        // The turn of the other session goes on.
        let other_path = format!("/v1/sessions/{}", kept["id"].as_str().unwrap());
        assert_eq!(app.get(&other_path).await.json()["in_use"], true);
        assert_eq!(app.send(Method::DELETE, &other_path, Value::Null, &[]).await.status, StatusCode::OK);
        drop(other);
        until_idle(&app).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_session_ends_what_is_read_into_it() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let append = format!("{path}/append");
    // Reading these tokens takes far longer than the deletion.
    let reading = app.send(Method::POST, &append, json!({"tokens": vec![5; 200_000]}), &[]);
    let deleting = async {
        while app.engine_stats().running == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        app.send(Method::DELETE, &path, Value::Null, &[]).await
    };
    let (read, deleted) = tokio::join!(reading, deleting);
    assert_eq!(deleted.status, StatusCode::OK);
    assert_eq!((read.status, read.code().as_str()), (StatusCode::NOT_FOUND, "session_deleted"));
    until_idle(&app).await;
    assert_eq!(app.engine_stats().finished, 0);
}

fn keys(names: &[(&str, &str)]) -> Keys {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let keys: Vec<Value> = names.iter().map(|(name, key)| json!({"name": name, "key": key})).collect();
    file.write_all(json!({"keys": keys}).to_string().as_bytes()).unwrap();
    Keys::load(Some(file.path()), &[]).unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn removing_a_key_ends_its_work() {
    let app = app().await;
    app.state.set_api_keys(keys(&[("stopped", KEY), ("other", OTHER)]));
    let (key, other) = ([("x-api-key", KEY)], [("x-api-key", OTHER)]);
    let made = app.send(Method::POST, "/v1/sessions", json!({}), &key).await.json();
    let kept = app.send(Method::POST, "/v1/sessions", json!({}), &other).await.json();
    let mut running = endless(&app, &made["id"], "continue", &key).await;
    let others = endless(&app, &kept["id"], "continue", &other).await;
    let plain = json!({"max_tokens": 500_000, "stream": true, "ignore_eos": true});
    let mut text = app.open("/v1/completions", crate::common::with(prompt("A", json!({})), plain), &key).await;
    // Setting the same keys again changes nothing.
    app.state.set_api_keys(keys(&[("stopped", KEY), ("other", OTHER)]));
    text.read_some().await;
    assert_eq!(app.engine_stats().running, 3);
    // The same name with another secret is another key.
    app.state.set_api_keys(keys(&[("stopped", "sk-replaced-0123456789"), ("other", OTHER)]));
    for stopped in [&mut running, &mut text] {
        let last = rest(stopped).await;
        assert!(last.contains("\"invalid_api_key\"") && last.contains("was removed"), "{last}");
    }
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let after = app.until_free_for(&path, &[("x-api-key", "sk-replaced-0123456789")]).await;
    assert_eq!(after["tokens"], made["tokens"], "nothing is committed");
    let path = format!("/v1/sessions/{}", kept["id"].as_str().unwrap());
    assert_eq!(app.send(Method::GET, &path, Value::Null, &other).await.json()["in_use"], true);
    app.state.set_api_keys(keys(&[("new", "sk-replaced-0123456789")]));
    until_idle(&app).await;
    drop(others);
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_outlive_their_clients_are_committed_at_shutdown() {
    let app = app().await;
    let mut turns = Vec::new();
    for policy in ["rollback", "commit", "continue"] {
        let made = session(&app, json!({})).await;
        let running = endless(&app, &made["id"], policy, &[]).await;
        turns.push((policy, format!("/v1/sessions/{}", made["id"].as_str().unwrap()), running));
    }
    app.state.drain();
    app.state.finish_turns();
    app.state.settle().await;
    for (policy, path, mut running) in turns {
        let last = rest(&mut running).await;
        let committed = policy != "rollback";
        assert_eq!((last.contains("[DONE]"), last.contains("\"shutting_down\"")), (committed, !committed), "{last}");
        let versions = app.get(&format!("{path}/turns")).await.json();
        let kinds: Vec<&str> =
            versions["data"].as_array().unwrap().iter().map(|it| it["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, if committed { vec!["create", "interrupted"] } else { vec!["create"] }, "{policy}");
    }
}
