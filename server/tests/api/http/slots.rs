//! llama.cpp's slots: the state that requests with `id_slot` leave is saved, restored, erased, exported and imported.

use axum::body::Body;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::common::sessions::{Answer, App, app};
use crate::common::with;

pub(super) const FOX: &str = "The fox said to the hare that it was late, and that the moon had risen";

pub(super) async fn complete(app: &App, slot: u64, prompt: impl Into<Value>, more: Value) -> Value {
    let body = json!({"prompt": prompt.into(), "n_predict": 6, "temperature": 0, "id_slot": slot, "cache_prompt": true,
        "return_tokens": true});
    let answer = app.post("/completion", with(body, more)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

pub(super) async fn act(app: &App, slot: &str, action: &str, file: &str) -> Answer {
    app.post(&format!("/slots/{slot}?action={action}"), json!({"filename": file})).await
}

/// Returns a prompt that begins with everything that the slot has read, as the same tokens.
pub(super) fn longer(before: &Value) -> Value {
    let mut pieces = vec![json!(FOX)];
    pieces.extend(before["tokens"].as_array().unwrap().clone());
    pieces.push(json!(" and then"));
    pieces.into()
}

fn state_path(slot: u64) -> String {
    format!("/slots/{slot}/state")
}

/// Returns an application without a prefix cache, so that only a slot can save work.
pub(super) async fn forgetful() -> App {
    use tidegate_server::checkpoint::OpenOptions;
    crate::common::sessions::app_from(OpenOptions { slots: 4, prefix_bytes: 0, ..OpenOptions::default() }).await
}

#[tokio::test]
async fn a_slot_is_saved_and_restored_and_its_text_is_not_computed_again() {
    let app = forgetful().await;
    let first = complete(&app, 1, FOX, json!({})).await;
    assert_eq!((&first["id_slot"], &first["timings"]["cache_n"]), (&json!(1), &json!(0)));
    let saved = act(&app, "1", "save", "fox.bin").await;
    assert_eq!(saved.status, StatusCode::OK, "{}", saved.text());
    let saved = saved.json();
    let read = first["tokens_evaluated"].as_u64().unwrap() + 6;
    assert_eq!((&saved["id_slot"], &saved["filename"]), (&json!(1), &json!("fox.bin")));
    assert_eq!(saved["n_saved"], read);
    assert!(saved["n_written"].as_u64().unwrap() > 1000 && saved["timings"]["save_ms"].is_f64(), "{saved}");

    // Another text takes the slot; the saved one can be restored there and in other slots.
    let whole = complete(&app, 9, longer(&first), json!({})).await;
    complete(&app, 1, "In the morning", json!({})).await;
    for slot in [1, 0] {
        let restored = act(&app, &slot.to_string(), "restore", "fox.bin").await;
        assert_eq!(restored.status, StatusCode::OK, "{}", restored.text());
        let restored = restored.json();
        assert_eq!((&restored["n_restored"], &restored["n_read"]), (&saved["n_saved"], &saved["n_written"]));
        assert!(restored["timings"]["restore_ms"].is_f64() && restored["id_slot"] == slot);
        let before = app.engine_stats().prompt_tokens;
        let next = complete(&app, slot, longer(&first), json!({})).await;
        assert_eq!(next["content"], whole["content"], "the same bits as computed at once");
        // No state contains the last token of the answer yet.
        assert_eq!(next["timings"]["cache_n"], read - 1);
        let computed = next["tokens_evaluated"].as_u64().unwrap() - (read - 1);
        assert_eq!(app.engine_stats().prompt_tokens - before, computed);
    }
    // A prompt that differs is computed, and `n_predict: 0` reads a prompt for several continuations.
    let other = complete(&app, 1, "The fox slept", json!({})).await;
    assert_eq!(other["timings"]["cache_n"], 0);
    let prepared = complete(&app, 2, FOX, json!({"n_predict": 0})).await;
    assert_eq!((&prepared["content"], &prepared["tokens_predicted"]), (&json!(""), &json!(0)));
    assert_eq!(act(&app, "2", "save", "prompt").await.status, StatusCode::OK);
    for end in [" and left", " Then"] {
        assert_eq!(act(&app, "2", "restore", "prompt").await.status, StatusCode::OK);
        let next = complete(&app, 2, format!("{FOX}{end}"), json!({})).await;
        assert_eq!(next["timings"]["cache_n"], prepared["tokens_evaluated"].as_u64().unwrap() - 1, "{next}");
    }
}

#[tokio::test]
async fn an_erased_slot_holds_nothing() {
    let app = forgetful().await;
    let first = complete(&app, 3, FOX, json!({})).await;
    assert_eq!(act(&app, "3", "save", "fox").await.status, StatusCode::OK);
    let erased = app.post("/slots/3?action=erase", Value::Null).await;
    assert_eq!(erased.status, StatusCode::OK, "{}", erased.text());
    assert_eq!(erased.json(), json!({"id_slot": 3, "n_erased": first["tokens_evaluated"].as_u64().unwrap() + 6}));
    assert_eq!(app.post("/slots/3?action=erase", Value::Null).await.json()["n_erased"], 0);
    for refused in [act(&app, "3", "save", "other").await, app.get(&state_path(3)).await] {
        assert_eq!(refused.status, StatusCode::NOT_FOUND, "{}", refused.text());
        assert_eq!((refused.json()["error"]["code"].clone(), refused.param()), (json!(404), "id_slot".into()));
    }
    assert_eq!(complete(&app, 3, longer(&first), json!({})).await["timings"]["cache_n"], 0);
    assert_eq!(act(&app, "3", "restore", "fox").await.status, StatusCode::OK, "what was saved is still there");
}

#[tokio::test]
async fn a_state_moves_to_another_server() {
    let (app, other) = (forgetful().await, forgetful().await);
    let first = complete(&app, 1, FOX, json!({})).await;
    let whole = complete(&app, 2, longer(&first), json!({})).await;
    let exported = app.get(&state_path(1)).await;
    assert_eq!((exported.status, exported.header("content-type")), (StatusCode::OK, "application/octet-stream".into()));
    assert!(exported.header("content-disposition").contains(".tidegate"));
    let put = async |app: &App, body: Body| {
        app.raw(Method::PUT, &state_path(7), body, &[("content-type", "application/octet-stream")]).await
    };
    complete(&other, 7, "In the morning", json!({})).await;
    let imported = put(&other, Body::from(exported.body.clone())).await;
    assert_eq!(imported.status, StatusCode::OK, "{}", imported.text());
    let read = first["tokens_evaluated"].as_u64().unwrap() + 6;
    assert_eq!(imported.json(), json!({"id_slot": 7, "n_restored": read, "n_read": exported.body.len()}));
    let next = complete(&other, 7, longer(&first), json!({})).await;
    assert_eq!((&next["content"], &next["timings"]["cache_n"]), (&whole["content"], &json!(read - 1)));
    assert_eq!(other.upload(exported.body.clone()).await.status, StatusCode::CREATED, "it is a snapshot");
    let broken = put(&other, Body::from(exported.body.slice(..1000))).await;
    assert_eq!(broken.status, StatusCode::BAD_REQUEST, "{}", broken.text());
    assert!(broken.json()["error"]["code"] == 400, "an error in llama.cpp's format");
}

#[tokio::test]
async fn slots_and_files_are_sessions_of_their_owner() {
    let app = forgetful().await;
    complete(&app, 1, FOX, json!({})).await;
    assert_eq!(act(&app, "1", "save", "fox").await.status, StatusCode::OK);
    assert_eq!(act(&app, "1", "save", "fox").await.status, StatusCode::OK, "a name is written again");
    let sessions = app.get("/v1/sessions").await.json()["data"].clone();
    let notes: Vec<&Value> = sessions.as_array().unwrap().iter().map(|session| &session["metadata"]).collect();
    assert_eq!(notes, [&json!({"llama.cpp file": "fox"}), &json!({"llama.cpp slot": "1"})]);
    assert_eq!(sessions[0]["version"], sessions[1]["version"], "saving copies no state");

    let theirs = [("authorization", "Bearer b")];
    let save = json!({"filename": "fox"});
    for action in ["save", "restore"] {
        let path = format!("/slots/1?action={action}");
        let refused = app.send(Method::POST, &path, save.clone(), &theirs).await;
        assert_eq!(refused.status, StatusCode::NOT_FOUND, "{}", refused.text());
    }
    assert_eq!(app.send(Method::GET, &state_path(1), Value::Null, &theirs).await.status, StatusCode::NOT_FOUND);
    let erased = app.send(Method::POST, "/slots/1?action=erase", Value::Null, &theirs).await;
    assert_eq!(erased.json()["n_erased"], 0);
    assert_eq!(app.get("/v1/sessions").await.json()["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_a_slot_cannot_be_is_refused() {
    let app = app().await;
    complete(&app, 1, FOX, json!({})).await;
    for (slot, action, file, param) in [
        ("x", "save", "fox", "id_slot"),
        ("-1", "save", "fox", "id_slot"),
        ("%2B1", "save", "fox", "id_slot"),
        ("65536", "save", "fox", "id_slot"),
        ("1", "save", "", "filename"),
        ("1", "save", "../fox", "filename"),
        ("1", "save", "/etc/fox", "filename"),
        ("1", "restore", ".fox", "filename"),
        ("1", "erase", "", "filename"),
        ("1", "restore", "a\\b", "filename"),
    ] {
        let refused = act(&app, slot, action, file).await;
        assert_eq!(
            (refused.status, refused.param()),
            (StatusCode::BAD_REQUEST, param.into()),
            "{slot} {action} {file}"
        );
        assert_eq!(refused.json()["error"]["code"], 400);
    }
    let missing = act(&app, "1", "restore", "none").await;
    assert_eq!((missing.status, missing.param()), (StatusCode::NOT_FOUND, "filename".into()), "{}", missing.text());
    for path in ["/slots/1", "/slots/1?action=drop"] {
        assert_eq!(app.post(path, json!({"filename": "a"})).await.status, StatusCode::BAD_REQUEST, "{path}");
    }
    assert_eq!(act(&app, "1", "save", &"a".repeat(129)).await.status, StatusCode::BAD_REQUEST);
    for (more, param) in [
        (json!({"id_slot": 65_536}), "id_slot"),
        (json!({"id_slot": -2}), "id_slot"),
        (json!({"prompt": ["a", "b"]}), "prompt"),
        (json!({"id_slot": -1, "n_predict": 0}), "n_predict"),
    ] {
        let body = with(json!({"prompt": "A", "n_predict": 2, "id_slot": 1}), more);
        let refused = app.post("/completion", body.clone()).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, param.into()), "{body}");
    }
    let any = app.post("/completion", json!({"prompt": "A", "n_predict": 2, "id_slot": -1})).await;
    assert_eq!((any.status, &any.json()["id_slot"]), (StatusCode::OK, &json!(-1)));
}

#[tokio::test]
async fn a_request_has_its_slot_for_itself() {
    let app = app().await;
    let long = json!({"prompt": FOX, "n_predict": 50_000, "id_slot": 1, "stream": true, "ignore_eos": true});
    let mut running = app.open("/completion", long, &[]).await;
    running.read_some().await;
    let busy = app.post("/completion", json!({"prompt": "A", "n_predict": 2, "id_slot": 1})).await;
    assert_eq!(busy.status, StatusCode::CONFLICT, "{}", busy.text());
    let erased = app.post("/slots/1?action=erase", Value::Null).await;
    assert_eq!(erased.status, StatusCode::OK, "{}", erased.text());
    let mut rest = String::new();
    while let Some(more) = running.next().await {
        rest += &more;
    }
    assert!(rest.contains("was deleted during the turn"), "{rest}");
    complete(&app, 1, "A", json!({"n_predict": 1})).await;
}
