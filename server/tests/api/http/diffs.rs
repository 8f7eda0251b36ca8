//! Diffs between the texts of versions: word by word, after their common beginning.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::{Location, StoreOptions};

use crate::common::checkpoint;
use crate::common::sessions::{Answer, App, app, app_storing, session};

fn id(session: &Value) -> &str {
    session["id"].as_str().unwrap()
}

fn version(session: &Value) -> &str {
    session["version"].as_str().unwrap()
}

async fn append(app: &App, session: &Value, text: &str) -> Value {
    let answer = app.post(&format!("/v1/sessions/{}/append", id(session)), json!({"text": text})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

async fn fork(app: &App, session: &Value) -> Value {
    app.post(&format!("/v1/sessions/{}/fork", id(session)), json!({})).await.json()["data"][0].clone()
}

async fn diff(app: &App, session: &Value, query: &str) -> Answer {
    app.get(&format!("/v1/sessions/{}/diff?{query}", id(session))).await
}

async fn found(app: &App, session: &Value, query: &str) -> Value {
    let answer = diff(app, session, query).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

async fn text(app: &App, session: &Value, query: &str) -> String {
    let answer = app.get(&format!("/v1/sessions/{}/text?{query}", id(session))).await;
    answer.json()["text"].as_str().unwrap().to_owned()
}

/// Joins the changes other than `op`: without insertions they give the first text, without deletions the second.
fn without(found: &Value, op: &str) -> String {
    let changes = found["changes"].as_array().unwrap().iter().filter(|change| change["op"] != op);
    changes.map(|change| change["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn forks_differ_in_what_they_have_added() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time there was"})).await;
    let other = fork(&app, &tale).await;
    let own = append(&app, &tale, " a fox, and it was late.").await;
    let theirs = append(&app, &other, " a crow, and it was very late.").await;
    let compared = found(&app, &tale, &format!("from={}&to={}", version(&own), version(&theirs))).await;
    assert_eq!((&compared["object"], &compared["id"]), (&json!("session.diff"), &tale["id"]));
    assert_eq!((&compared["from"], &compared["to"]), (&own["version"], &theirs["version"]));
    assert_eq!(compared["common_ancestor"], tale["version"]);
    let common = compared["common_tokens"].as_u64().unwrap();
    assert!(common >= tale["tokens"].as_u64().unwrap(), "{compared}");
    // The changes do not repeat the common beginning.
    for (session, op) in [(&tale, "insert"), (&other, "delete")] {
        let begins = text(&app, session, &format!("end={common}")).await;
        assert_eq!(begins + &without(&compared, op), text(&app, session, "").await);
    }
    let words = |op: &str| -> Vec<Value> {
        let changes = compared["changes"].as_array().unwrap().iter().filter(|change| change["op"] == op);
        changes.map(|change| change["text"].clone()).collect()
    };
    assert_eq!((words("delete"), words("insert")), (vec![json!(" fox")], vec![json!(" crow"), json!(" very")]));

    // A session's id stands for its head, and the head is the default.
    let same = found(&app, &other, &format!("from={}", id(&tale))).await;
    assert_eq!(
        (&same["from"], &same["to"], &same["changes"]),
        (&own["version"], &theirs["version"], &compared["changes"])
    );
    let backwards = found(&app, &tale, &format!("from={}", id(&other))).await;
    assert_eq!(without(&backwards, "insert"), without(&compared, "delete"));
}

#[tokio::test]
async fn a_version_and_a_later_one_differ_in_the_turn_between_them() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time"})).await;
    let path = format!("/v1/sessions/{}", id(&tale));
    assert_eq!(app.send(Method::PUT, &format!("{path}/tags/start"), Value::Null, &[]).await.status, StatusCode::OK);
    append(&app, &tale, " there was a fox").await;
    let turn = found(&app, &tale, "from=start").await;
    assert_eq!(turn["from"], tale["version"]);
    assert_eq!((&turn["common_tokens"], &turn["common_ancestor"]), (&tale["tokens"], &tale["version"]));
    assert_eq!(turn["changes"], json!([{"op": "insert", "text": " there was a fox"}]));
    let back = found(&app, &tale, &format!("from={}&to=start", id(&tale))).await;
    assert_eq!(back["changes"], json!([{"op": "delete", "text": " there was a fox"}]));
    let none = found(&app, &tale, "from=start&to=start").await;
    assert_eq!((&none["changes"], &none["common_tokens"]), (&json!([]), &tale["tokens"]));
    // An empty text can be compared too: it has no token in common with the other text.
    let empty = session(&app, json!({})).await;
    let all = found(&app, &tale, &format!("from={}&to=start", id(&empty))).await;
    assert_eq!((&all["common_tokens"], &all["common_ancestor"]), (&json!(0), &Value::Null));
    assert_eq!(all["changes"], json!([{"op": "insert", "text": "Once upon a time"}]));
}

#[tokio::test]
async fn a_difference_begins_with_a_whole_word_and_a_whole_character() {
    let app = app().await;
    for (one, other) in
        [("The foxes ran", "The foxglove ran"), ("Ein Haus 🦊", "Ein Haus 🦉"), ("日本語の本", "日本語の木")]
    {
        let [first, second] = [session(&app, json!({"text": one})).await, session(&app, json!({"text": other})).await];
        let compared = found(&app, &second, &format!("from={}", id(&first))).await;
        let common = compared["common_tokens"].as_u64().unwrap();
        let begins = text(&app, &first, &format!("end={common}")).await;
        assert_eq!(begins.clone() + &without(&compared, "insert"), one);
        assert_eq!(begins + &without(&compared, "delete"), other);
        assert!(!compared.to_string().contains('\u{fffd}'), "{compared}");
        if one.starts_with("The") {
            let deleted =
                compared["changes"].as_array().unwrap().iter().find(|change| change["op"] == "delete").unwrap();
            assert_eq!(deleted["text"], " foxes");
        }
    }
}

#[tokio::test]
async fn what_cannot_be_compared_is_refused_by_name() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time"})).await;
    let bob = [("authorization", "Bearer b")];
    let theirs = app.send(Method::POST, "/v1/sessions", json!({"text": "Mine"}), &bob).await.json();
    let unknown =
        ["ver_00000000000000000000000000000000", "ses_00000000000000000000000000000000", "no-tag", ".", "ver_x"];
    for name in unknown.into_iter().chain([version(&theirs), id(&theirs)]) {
        for (query, param) in [(format!("from={name}"), "from"), (format!("from={}&to={name}", version(&tale)), "to")] {
            let refused = diff(&app, &tale, &query).await;
            assert_eq!(
                (refused.status, &*refused.param()),
                (StatusCode::NOT_FOUND, param),
                "{query}: {}",
                refused.text()
            );
        }
    }
    let path = format!("/v1/sessions/{}/diff?from={}", id(&tale), version(&tale));
    let stranger = app.send(Method::GET, &path, Value::Null, &bob).await;
    assert_eq!((stranger.status, &*stranger.param()), (StatusCode::NOT_FOUND, "session"));
    for query in ["", "to=x", "from=x&version=y"] {
        assert_eq!(diff(&app, &tale, query).await.status, StatusCode::BAD_REQUEST, "{query}");
    }

    let [long, short] = [" a".repeat(5001), " b".repeat(3)];
    let [long, short] = [session(&app, json!({"text": long})).await, session(&app, json!({"text": short})).await];
    let refused = diff(&app, &long, &format!("from={}", id(&short))).await;
    assert_eq!((refused.status, &*refused.code()), (StatusCode::BAD_REQUEST, "diff_too_long"), "{}", refused.text());
    assert!(
        refused.text().contains("at most 5000 words") && refused.text().contains("found 5001"),
        "{}",
        refused.text()
    );
}

#[tokio::test]
async fn a_text_that_is_not_kept_cannot_be_compared() {
    let options = StoreOptions { keep_text: false, ..StoreOptions::new(Location::Memory) };
    let app = app_storing(open(&checkpoint(), &OpenOptions::default()).unwrap().0, options).await;
    let tale = session(&app, json!({"text": "Once"})).await;
    let empty = session(&app, json!({})).await;
    for (query, param) in [
        (format!("from={}&to={}", id(&tale), id(&empty)), "from"),
        (format!("from={}&to={}", id(&empty), id(&tale)), "to"),
    ] {
        let refused = diff(&app, &tale, &query).await;
        assert_eq!((refused.status, &*refused.code()), (StatusCode::NOT_FOUND, "text_not_kept"), "{}", refused.text());
        assert_eq!(refused.param(), param);
    }
}
