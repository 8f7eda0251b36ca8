//! Adopting forks, tags, labels, lineages and filtered lists over HTTP.

use crate::common::sessions::{App, app, session};
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

const BOB: &[(&str, &str)] = &[("authorization", "Bearer b")];

fn path(session: &Value) -> String {
    format!("/v1/sessions/{}", session["id"].as_str().unwrap())
}

async fn append(app: &App, session: &Value, text: &str) -> Value {
    let answer = app.post(&format!("{}/append", path(session)), json!({"text": text})).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

async fn ok(app: &App, method: Method, path: &str, body: Value) -> Value {
    let answer = app.send(method, path, body, &[]).await;
    assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
    answer.json()
}

#[tokio::test]
async fn a_conversation_adopts_its_best_fork() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time"})).await;
    let forks = app.post(&format!("{}/fork", path(&tale)), json!({"n": 2})).await.json();
    let best = append(&app, &forks["data"][1], " there was a fox").await;
    let rewind = format!("{}/rewind", path(&tale));
    let adopted = ok(&app, Method::POST, &rewind, json!({"version": best["version"]})).await;
    assert_eq!((&adopted["version"], &adopted["tokens"]), (&best["version"], &best["tokens"]));
    let turns = ok(&app, Method::GET, &format!("{}/turns", path(&tale)), Value::Null).await;
    let last = turns["data"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["version"], &last["head"], &last["session"]), (&best["version"], &json!(true), &best["id"]));

    let theirs = app.send(Method::POST, "/v1/sessions", json!({"text": "Mine"}), BOB).await.json();
    for unknown in [theirs["version"].as_str().unwrap(), "ver_00000000000000000000000000000000", "ver_x", "no-tag"] {
        let refused = app.post(&rewind, json!({"version": unknown})).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::NOT_FOUND, "version".into()), "{unknown}");
    }
    let refused = app.send(Method::POST, &rewind, json!({"version": best["version"]}), BOB).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::NOT_FOUND, "session".into()));
}

#[tokio::test]
async fn a_tag_is_accepted_where_a_version_is() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time"})).await;
    let path = path(&tale);
    let tagged = ok(&app, Method::PUT, &format!("{path}/tags/start"), Value::Null).await;
    assert_eq!(
        (&tagged["object"], &tagged["name"], &tagged["version"]),
        (&json!("tag"), &json!("start"), &tale["version"])
    );
    let later = append(&app, &tale, " there was a fox").await;
    assert_eq!(later["tags"], json!({"start": tale["version"]}));
    ok(&app, Method::PUT, &format!("{path}/tags/v1.0"), json!({})).await;
    let moved = ok(&app, Method::PUT, &format!("{path}/tags/v1.0"), json!({"version": "start"})).await;
    assert_eq!((&moved["version"], &moved["kept"]), (&tale["version"], &json!(true)));
    let turns = ok(&app, Method::GET, &format!("{path}/turns"), Value::Null).await;
    assert_eq!((&turns["data"][0]["tags"], &turns["data"][1]["tags"]), (&json!(["start", "v1.0"]), &json!([])));

    let fork = app.post(&format!("{path}/fork"), json!({"version": "start"})).await.json()["data"][0].clone();
    assert_eq!((&fork["version"], &fork["tags"]), (&tale["version"], &json!({})));
    let file = app.get(&format!("{path}/snapshot?version=start")).await;
    assert_eq!(file.header("etag"), format!("\"{}\"", tale["version"].as_str().unwrap()));
    for what in ["text", "tokens", "messages"] {
        let read = ok(&app, Method::GET, &format!("{path}/{what}?version=start"), Value::Null).await;
        let total = if what == "messages" { &json!(1) } else { &tale["tokens"] };
        assert_eq!((&read["version"], &read["total"]), (&tale["version"], total), "{what}");
        let unknown = app.get(&format!("{path}/{what}?version=unknown")).await;
        assert_eq!((unknown.status, unknown.param()), (StatusCode::NOT_FOUND, "version".into()), "{what}");
    }
    let rewound = ok(&app, Method::POST, &format!("{path}/rewind"), json!({"version": "start"})).await;
    assert_eq!(rewound["version"], tale["version"]);

    let tags = ok(&app, Method::GET, &format!("{path}/tags"), Value::Null).await;
    let names: Vec<&str> = tags["data"].as_array().unwrap().iter().map(|tag| tag["name"].as_str().unwrap()).collect();
    assert_eq!((names, &tags["has_more"]), (vec!["start", "v1.0"], &json!(false)));
    let removed = ok(&app, Method::DELETE, &format!("{path}/tags/v1.0"), Value::Null).await;
    assert_eq!(removed, json!({"object": "tag.deleted", "name": "v1.0", "deleted": true}));
    let again = app.send(Method::DELETE, &format!("{path}/tags/v1.0"), Value::Null, &[]).await;
    assert_eq!((again.status, again.param()), (StatusCode::NOT_FOUND, "name".into()));
    let gone = app.post(&format!("{path}/fork"), json!({"version": "v1.0"})).await;
    assert_eq!((gone.status, gone.param()), (StatusCode::NOT_FOUND, "version".into()));
    for wrong in ["ver_1", ".x", "a%20b", &"x".repeat(65)] {
        let refused = app.send(Method::PUT, &format!("{path}/tags/{wrong}"), json!({}), &[]).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "name".into()), "{wrong}");
    }
    for number in 1..100 {
        ok(&app, Method::PUT, &format!("{path}/tags/t{number}"), Value::Null).await;
    }
    let refused = app.send(Method::PUT, &format!("{path}/tags/more"), Value::Null, &[]).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "name".into()));
    assert!(refused.text().contains("at most 100 tags"), "{}", refused.text());
    let theirs = app.send(Method::GET, &format!("{path}/tags"), Value::Null, BOB).await;
    assert_eq!(theirs.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn labels_are_changed_later() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time", "label": "first"})).await;
    let path = path(&tale);
    append(&app, &tale, " there was a fox").await;
    assert_eq!(ok(&app, Method::PATCH, &path, json!({"label": "fox"})).await["label"], "fox");
    assert_eq!(ok(&app, Method::PATCH, &path, json!({"metadata": {}})).await["label"], "fox");
    ok(&app, Method::PUT, &format!("{path}/tags/now"), Value::Null).await;
    let first = format!("{path}/turns/{}", tale["version"].as_str().unwrap());
    let changed = ok(&app, Method::PATCH, &first, json!({"label": "start"})).await;
    assert_eq!(
        (&changed["label"], &changed["head"], &changed["object"]),
        (&json!("start"), &json!(false), &json!("turn"))
    );
    assert_eq!(ok(&app, Method::PATCH, &first, json!({})).await["label"], "start");
    let cleared = ok(&app, Method::PATCH, &format!("{path}/turns/now"), json!({"label": null})).await;
    assert_eq!((&cleared["label"], &cleared["head"], &cleared["tags"]), (&Value::Null, &json!(true), &json!(["now"])));
    let turns = ok(&app, Method::GET, &format!("{path}/turns"), Value::Null).await;
    assert_eq!((&turns["data"][0]["label"], &turns["data"][1]["label"]), (&json!("start"), &Value::Null));
    for path in [&path, &first] {
        let refused = app.send(Method::PATCH, path, json!({"label": "x".repeat(257)}), &[]).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "label".into()));
    }
    let other = session(&app, json!({"text": "Another"})).await;
    let missing = format!("{path}/turns/{}", other["version"].as_str().unwrap());
    for body in [json!({"label": "x"}), json!({})] {
        let refused = app.send(Method::PATCH, &missing, body, &[]).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::NOT_FOUND, "version".into()));
    }
}

#[tokio::test]
async fn a_lineage_crosses_forks_and_has_the_common_ancestor() {
    let app = app().await;
    let tale = session(&app, json!({"text": "Once upon a time"})).await;
    let fork = app.post(&format!("{}/fork", path(&tale)), json!({})).await.json()["data"][0].clone();
    let own = append(&app, &tale, " there was a fox").await;
    let other = append(&app, &fork, " there was a crow").await;
    ok(&app, Method::PUT, &format!("{}/tags/crow", path(&fork)), Value::Null).await;

    let lineage = format!("{}/lineage", path(&fork));
    let all = ok(&app, Method::GET, &lineage, Value::Null).await;
    let data = all["data"].as_array().unwrap();
    assert_eq!((&data[0]["version"], &data[0]["session"]), (&other["version"], &fork["id"]));
    assert_eq!((&data[0]["tags"], &data[0]["kept"]), (&json!(["crow"]), &json!(true)));
    assert_eq!((&data[1]["version"], &data[1]["session"]), (&tale["version"], &tale["id"]));
    assert_eq!((data.len(), &data[1]["parent"], &all["has_more"]), (2, &Value::Null, &json!(false)));
    assert_eq!((&all["common_ancestor"], &all["with"]), (&Value::Null, &Value::Null));
    let page = ok(&app, Method::GET, &format!("{lineage}?limit=1"), Value::Null).await;
    assert_eq!((page["data"].as_array().unwrap().len(), &page["has_more"]), (1, &json!(true)));
    let after = format!("{lineage}?after={}", other["version"].as_str().unwrap());
    assert_eq!(ok(&app, Method::GET, &after, Value::Null).await["data"], json!([data[1]]));

    let id = tale["id"].as_str().unwrap();
    let compared = ok(&app, Method::GET, &format!("{lineage}?version=crow&with={id}"), Value::Null).await;
    assert_eq!(compared["common_ancestor"], tale["version"]);
    assert_eq!(compared["with"], json!({"session": id, "version": own["version"]}));
    let version = own["version"].as_str().unwrap();
    let compared = ok(&app, Method::GET, &format!("{lineage}?with={version}"), Value::Null).await;
    assert_eq!((&compared["common_ancestor"], &compared["with"]["session"]), (&tale["version"], &Value::Null));
    let unknown = "ver_00000000000000000000000000000000";
    for (query, status, param) in [
        (format!("version={unknown}"), 404, "version"),
        ("version=none".to_owned(), 404, "version"),
        (format!("after={unknown}"), 404, "after"),
        (format!("with={unknown}"), 404, "with"),
        ("with=ses_00000000000000000000000000000000".to_owned(), 404, "with"),
        ("limit=0".to_owned(), 400, "limit"),
    ] {
        let refused = app.get(&format!("{lineage}?{query}")).await;
        assert_eq!((refused.status.as_u16(), &*refused.param()), (status, param), "{query}");
    }
}

#[tokio::test]
async fn a_list_has_the_sessions_that_match() {
    let app = app().await;
    let fox = session(&app, json!({"metadata": {"tale": "fox", "who[0]": "a b"}, "label": "one"})).await;
    let crow = session(&app, json!({"metadata": {"tale": "crow"}})).await;
    let fork = app.post(&format!("{}/fork", path(&fox)), json!({"metadata": {}})).await.json()["data"][0].clone();
    ok(&app, Method::PUT, &format!("{}/tags/best", path(&crow)), Value::Null).await;
    let created = fox["created"].as_u64().unwrap();
    for (query, expected) in [
        ("metadata[tale]=fox".to_owned(), vec![&fox]),
        ("metadata%5Bwho%5B0%5D%5D=a+b&metadata[tale]=fox".to_owned(), vec![&fox]),
        ("metadata[tale]=hare".to_owned(), vec![]),
        ("label=one&order=asc".to_owned(), vec![&fox, &fork]),
        ("tag=best".to_owned(), vec![&crow]),
        (format!("forked_from={}", fox["id"].as_str().unwrap()), vec![&fork]),
        (format!("created_after={}&updated_after={}", created - 1, created - 1), vec![&fork, &crow, &fox]),
        (format!("created_before={created}"), vec![]),
        (format!("updated_before={created}"), vec![]),
    ] {
        let page = ok(&app, Method::GET, &format!("/v1/sessions?{query}"), Value::Null).await;
        let found: Vec<&Value> = page["data"].as_array().unwrap().iter().map(|session| &session["id"]).collect();
        assert_eq!(found, expected.iter().map(|session| &session["id"]).collect::<Vec<_>>(), "{query}");
        assert_eq!((&page["has_more"], &page["next"]), (&json!(false), &Value::Null));
    }
    let page = ok(&app, Method::GET, "/v1/sessions?label=one&limit=1", Value::Null).await;
    assert_eq!((&page["next"], &page["has_more"]), (&crow["id"], &json!(true)), "the last that was looked at");
    let refused = app.get("/v1/sessions?metadata[tale]=a&metadata[tale]=b").await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "metadata".into()));
}
