//! Sessions over HTTP with the shipped checkpoint: creating, continuing, forking, rewinding, downloading and uploading.

use crate::common::sessions::{App, app, ids, prompt, session, state_of};
use axum::body::Body;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

/// Runs a turn and returns its answer.
async fn turn(app: &App, session: &Value, text: &str, more: Value) -> Value {
    let body = crate::common::with(prompt(text, more), json!({"session": session["id"]}));
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

#[tokio::test]
async fn a_turn_continues_the_previous_one() {
    let app = app().await;
    let whole = app.post("/v1/completions", prompt("Once upon a time", json!({"max_tokens": 24}))).await.json();
    let made = session(&app, json!({"seed": 1, "metadata": {"name": "a tale"}})).await;
    assert_eq!((made["tokens"].as_u64(), made["parent"].as_str()), (Some(0), None));
    assert_eq!(made["metadata"]["name"], "a tale");

    let first = turn(&app, &made, "Once upon a time", json!({})).await;
    let second = turn(&app, &made, "", json!({})).await;
    let third = turn(&app, &made, "", json!({})).await;
    assert_eq!([ids(&first), ids(&second), ids(&third)].concat(), ids(&whole));
    let info = &third["session"];
    assert_eq!(info["id"], made["id"]);
    assert_eq!(info["parent"], second["session"]["version"]);
    assert_eq!((&info["restored"], &info["recomputed_tokens"]), (&json!(true), &json!(0)));
    assert_eq!(info["state_bytes"], made["state_bytes"]);
    assert_eq!(first["session"]["restored"], false, "there was nothing to restore");
    let tokens = whole["usage"]["prompt_tokens"].as_u64().unwrap() + 24;
    assert_eq!(info["tokens"], tokens);

    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let now = app.get(&path).await;
    assert_eq!(now.header("etag"), format!("\"{}\"", info["version"].as_str().unwrap()));
    assert_eq!((&now.json()["tokens"], &now.json()["version"]), (&json!(tokens), &info["version"]));
    let turns = app.get(&format!("{path}/turns")).await.json();
    let kinds: Vec<&str> = turns["data"].as_array().unwrap().iter().map(|t| t["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["create", "turn", "turn", "turn"]);
    assert_eq!(turns["data"][3]["head"], true);
}

#[tokio::test]
async fn a_stream_states_its_version_in_the_last_chunk() {
    let app = app().await;
    let made = session(&app, json!({"text": "The old house"})).await;
    assert!(made["tokens"].as_u64().unwrap() > 2);
    let body = crate::common::with(
        prompt("", json!({"stream": true, "stream_options": {"include_usage": true}})),
        json!({"session": made["id"]}),
    );
    let answer = app.post("/v1/completions", body).await;
    let text = answer.text();
    let chunks: Vec<Value> =
        crate::common::events(&text).iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
    let [.., finish, usage] = chunks.as_slice() else { panic!("{text}") };
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
    assert_eq!(finish["session"], usage["session"]);
    let head = app.get(&format!("/v1/sessions/{}", made["id"].as_str().unwrap())).await.json();
    assert_eq!(finish["session"]["version"], head["version"]);
    assert!(text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn forks_are_independent_and_give_the_same_answer_to_the_same_request() {
    let app = app().await;
    let made = session(&app, json!({"text": "The fox said to the hare", "seed": 9})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let forks = app.post(&format!("{path}/fork"), json!({"n": 3})).await;
    assert_eq!(forks.status, StatusCode::CREATED);
    let forks = forks.json()["data"].as_array().unwrap().clone();
    assert_eq!(forks.len(), 3);
    let warm = json!({"temperature": 1.0});
    let mut answers = Vec::new();
    for fork in forks.iter().chain([&made]) {
        answers.push(ids(&turn(&app, fork, ", my dear", warm.clone()).await));
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "the same snapshot and request give the same answer");
    let other = turn(&app, &forks[0], "", json!({"temperature": 1.0, "seed": 5})).await;
    let unmoved = app.get(&format!("/v1/sessions/{}", forks[1]["id"].as_str().unwrap())).await.json();
    assert_ne!(unmoved["version"], other["session"]["version"]);
    let from = &unmoved["forked_from"];
    assert_eq!((&from["session"], &from["version"]), (&made["id"], &made["version"]));
}

#[tokio::test]
async fn a_rewound_session_repeats_its_answer() {
    let app = app().await;
    let made = session(&app, json!({"seed": 4})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let first = turn(&app, &made, "In the morning", json!({"temperature": 0.9})).await;
    let second = turn(&app, &made, " and then", json!({"temperature": 0.9})).await;
    let stale = made["version"].as_str().unwrap();
    let to = json!({"version": first["session"]["version"]});
    let refused = app.send(Method::POST, &format!("{path}/rewind"), to.clone(), &[("if-match", stale)]).await;
    assert_eq!((refused.status, refused.code()), (StatusCode::PRECONDITION_FAILED, "version_mismatch".into()));
    let rewound = app.post(&format!("{path}/rewind"), to).await.json();
    assert_eq!(rewound["version"], first["session"]["version"]);
    let again = turn(&app, &made, " and then", json!({"temperature": 0.9})).await;
    assert_eq!(ids(&again), ids(&second));
    assert_eq!(again["session"]["parent"], second["session"]["parent"]);
    let turns = app.get(&format!("{path}/turns")).await.json();
    assert_eq!(turns["data"].as_array().unwrap().len(), 4, "the abandoned branch is still listed");
}

#[tokio::test]
async fn a_stale_version_and_a_session_in_use_are_refused() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let body = crate::common::with(prompt("Tom", json!({"max_tokens": 4})), json!({"session": made["id"]}));
    let other = "ver_00000000000000000000000000000000";
    let stale = app.send(Method::POST, "/v1/completions", body.clone(), &[("if-match", other)]).await;
    assert_eq!(stale.status, StatusCode::PRECONDITION_FAILED);
    let right = made["version"].as_str().unwrap();
    let fresh = app.send(Method::POST, "/v1/completions", body.clone(), &[("if-match", right)]).await;
    assert_eq!(fresh.status, StatusCode::OK);

    let long = crate::common::with(body.clone(), json!({"max_tokens": 100_000, "stream": true, "ignore_eos": true}));
    let running = app.open("/v1/completions", long, &[]).await;
    let busy = app.post("/v1/completions", body.clone()).await;
    assert_eq!((busy.status, busy.code()), (StatusCode::CONFLICT, "session_in_use".into()));
    assert_eq!(busy.header("retry-after"), "1");
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    assert_eq!(app.get(&path).await.json()["in_use"], true);
    // A fork during a turn starts from the last commit.
    let fork = app.post(&format!("{path}/fork"), json!({})).await.json();
    assert_eq!(fork["data"][0]["version"], fresh.json()["session"]["version"]);
    // A waiting request gets the session after the running turn disconnects without a change.
    let waiting = app.send(Method::POST, "/v1/completions", body, &[("prefer", "wait=30")]);
    let (waited, ()) = tokio::join!(waiting, async {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        drop(running);
    });
    assert_eq!(waited.status, StatusCode::OK, "{}", waited.text());
    assert_eq!(waited.json()["session"]["parent"], fresh.json()["session"]["version"]);
}

#[tokio::test]
async fn a_repeated_turn_with_the_same_key_runs_once() {
    let app = app().await;
    let made = session(&app, json!({"seed": 2})).await;
    let body = crate::common::with(prompt("Once", json!({"temperature": 1.1})), json!({"session": made["id"]}));
    let key = [("idempotency-key", "turn-1")];
    let first = app.send(Method::POST, "/v1/completions", body.clone(), &key).await;
    let again = app.send(Method::POST, "/v1/completions", body.clone(), &key).await;
    assert_eq!(first.text(), again.text());
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    assert_eq!(app.get(&path).await.json()["version"], first.json()["session"]["version"]);
    let other = crate::common::with(body.clone(), json!({"max_tokens": 9}));
    let reused = app.send(Method::POST, "/v1/completions", other, &key).await;
    assert_eq!((reused.status, reused.code()), (StatusCode::UNPROCESSABLE_ENTITY, "idempotency_key_reused".into()));
    // The same key of another owner is unrelated.
    let theirs = [("idempotency-key", "turn-1"), ("authorization", "Bearer other")];
    let refused = app.send(Method::POST, "/v1/completions", body.clone(), &theirs).await;
    assert_eq!(refused.status, StatusCode::NOT_FOUND);
    // A repeated stream returns the first result as a stream.
    let streamed = crate::common::with(body, json!({"stream": true}));
    let key = [("idempotency-key", "turn-2")];
    let first = app.send(Method::POST, "/v1/completions", streamed.clone(), &key).await.texts();
    let again = app.send(Method::POST, "/v1/completions", streamed, &key).await.texts();
    assert_eq!(first, again);
}

#[tokio::test]
async fn a_snapshot_continues_exactly_on_another_server() {
    let (here, there) = (app().await, app().await);
    let made = session(&here, json!({"seed": 6})).await;
    turn(&here, &made, "The rain", json!({"temperature": 1.0, "max_tokens": 11, "stop": ["zz"]})).await;
    let path = format!("/v1/sessions/{}/snapshot", made["id"].as_str().unwrap());
    let bytes = here.get(&path).await;
    assert_eq!(bytes.header("content-type"), "application/octet-stream");
    let moved = there.upload(bytes.body.clone()).await;
    assert_eq!(moved.status, StatusCode::CREATED, "{}", moved.text());
    let moved = moved.json();
    let stays = turn(&here, &made, "", json!({"temperature": 1.0})).await;
    let goes = turn(&there, &moved, "", json!({"temperature": 1.0})).await;
    assert_eq!(ids(&stays), ids(&goes));
    let at = |id: &Value| format!("/v1/sessions/{}/snapshot", id.as_str().unwrap());
    let (a, b) = (here.get(&at(&made["id"])).await.body, there.get(&at(&moved["id"])).await.body);
    assert_eq!(state_of(&a), state_of(&b), "not a bit differs");

    let mut damaged = bytes.body.to_vec();
    damaged[5000] ^= 1;
    let refused = there.upload(damaged.into()).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "snapshot".into()));
    let long = there.upload(vec![0; 32 << 20].into()).await;
    assert_eq!(long.status, StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn appended_text_is_read_without_an_answer() {
    let app = app().await;
    let whole = app.post("/v1/completions", prompt("The old house stood on a hill.", json!({}))).await.json();
    let made = session(&app, json!({})).await;
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let first = app.post(&format!("{path}/append"), json!({"text": "The old house", "label": "title"})).await.json();
    assert_eq!(first["label"], "title");
    let second = app.post(&format!("{path}/append"), json!({"text": " stood on a hill."})).await.json();
    assert_eq!(second["appended_tokens"].as_u64().unwrap() + first["tokens"].as_u64().unwrap(), second["tokens"]);
    assert_eq!(ids(&turn(&app, &made, "", json!({})).await), ids(&whole));
    for (body, param) in [
        (json!({}), "text"),
        (json!({"text": ""}), "text"),
        (json!({"tokens": [4096]}), "tokens"),
        (json!({"text": "a", "tokens": [1]}), "text"),
        (json!({"label": "x".repeat(300), "text": "a"}), "label"),
        (json!({"txt": "a"}), "txt"),
    ] {
        let refused = app.post(&format!("{path}/append"), body.clone()).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, param.into()), "{body}");
    }
}

#[tokio::test]
async fn sessions_are_listed_changed_and_deleted() {
    let app = app().await;
    let mut made = Vec::new();
    for i in 0..5 {
        made.push(session(&app, json!({"metadata": {"i": i.to_string()}})).await);
    }
    let page = app.get("/v1/sessions?limit=2&order=asc").await.json();
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&made[0]["id"], &json!(true)));
    let next = format!("/v1/sessions?limit=10&order=asc&after={}", page["last_id"].as_str().unwrap());
    let next = app.get(&next).await.json();
    assert_eq!((next["data"].as_array().unwrap().len(), &next["has_more"]), (3, &json!(false)));
    assert_eq!(app.get("/v1/sessions").await.json()["data"][0]["id"], made[4]["id"], "newest first");

    let path = format!("/v1/sessions/{}", made[1]["id"].as_str().unwrap());
    let change = json!({"metadata": {"name": "x"}, "ttl_seconds": 60});
    let changed = app.send(Method::PATCH, &path, change, &[]).await.json();
    assert_eq!((&changed["metadata"], &changed["ttl_seconds"]), (&json!({"name": "x"}), &json!(60)));
    assert!(changed["expires"].as_u64().is_some());
    let changed = app.send(Method::PATCH, &path, json!({"ttl_seconds": null}), &[]).await.json();
    assert_eq!((&changed["expires"], &changed["metadata"]["name"]), (&Value::Null, &json!("x")));

    let gone = app.send(Method::DELETE, &path, Value::Null, &[]).await.json();
    assert_eq!((&gone["deleted"], &gone["id"]), (&json!(true), &made[1]["id"]));
    let missing = app.get(&path).await;
    assert_eq!((missing.status, missing.code()), (StatusCode::NOT_FOUND, "not_found".into()));
    for (param, value) in [("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up"), ("x", "1")] {
        let answer = app.get(&format!("/v1/sessions?{param}={value}")).await;
        assert_eq!((answer.status, answer.param()), (StatusCode::BAD_REQUEST, param.into()), "{value}");
    }
    for body in [json!({"ttl_seconds": 0}), json!({"metadata": {"": "x"}}), json!({"seed": "x"}), json!({"n": 1})] {
        assert_eq!(app.post("/v1/sessions", body.clone()).await.status, StatusCode::BAD_REQUEST, "{body}");
    }
}

#[tokio::test]
async fn a_chat_in_a_session_equals_a_chat_with_its_history() {
    let app = app().await;
    let say = |role: &str, text: &str| json!({"role": role, "content": text});
    let ask = |messages: Value, more: Value| {
        let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0, "return_token_ids": true});
        crate::common::with(body, more)
    };
    let made = session(&app, json!({})).await;
    let id = json!({"session": made["id"]});
    let hello = say("user", "Tell me of the sea.");
    let first = app.post("/v1/chat/completions", ask(json!([hello]), id.clone())).await.json();
    assert_eq!(first["object"], "chat.completion");
    let answer = first["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let plain = app.post("/v1/chat/completions", ask(json!([hello]), json!({}))).await.json();
    assert_eq!(plain["choices"][0]["message"]["content"], answer);

    let more = say("user", "And of the ships?");
    let second = app.post("/v1/chat/completions", ask(json!([more]), id)).await.json();
    let history = json!([hello, say("assistant", &answer), more]);
    let plain = app.post("/v1/chat/completions", ask(history, json!({}))).await.json();
    for field in ["message", "finish_reason", "stop_reason", "token_ids"] {
        assert_eq!(second["choices"][0][field], plain["choices"][0][field], "{field}");
    }
    assert!(plain["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 8, "{plain}");
}

#[tokio::test]
async fn a_resent_history_is_not_computed_again() {
    let app = app().await;
    let once = prompt("It was late in the autumn, and the rain had not ceased since Sunday.", json!({}));
    let first = app.post("/v1/completions", once.clone()).await.json();
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = app.post("/v1/completions", once.clone()).await.json();
    let tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], tokens - 1, "all but the last");
    assert_eq!(ids(&again), ids(&first));

    let before = app.engine_stats().prompt_tokens;
    let said = first["choices"][0]["text"].as_str().unwrap();
    // The tokenizer splits this text as the model did, so the end of the answer is a prefix of this prompt too.
    let longer = format!("{}{said} Then", once["prompt"].as_str().unwrap());
    let longer = app.post("/v1/completions", prompt(&longer, json!({}))).await.json();
    let usage = &longer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!(app.engine_stats().prompt_tokens - before, usage["prompt_tokens"].as_u64().unwrap() - cached);
    assert!(cached > tokens, "the end of the answer was stored as well: {usage}");
    let other = app.send(Method::POST, "/v1/completions", once, &[("authorization", "Bearer b")]).await.json();
    assert_eq!(other["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "another owner's");
}

#[tokio::test]
async fn a_state_kept_by_the_client_leaves_nothing_on_the_server() {
    let app = crate::common::sessions::app_with(b"0123456789abcdef0123456789abcdef").await;
    let whole = app.post("/v1/completions", prompt("Once upon a time", json!({"max_tokens": 16}))).await.json();
    let first = app.post("/v1/completions", prompt("Once upon a time", json!({"return_state": true}))).await.json();
    let state = first["state"].as_str().unwrap().to_owned();
    let second = app.post("/v1/completions", prompt("", json!({"state": state}))).await.json();
    assert_eq!([ids(&first), ids(&second)].concat(), ids(&whole));
    assert_eq!(app.get("/v1/sessions").await.json()["data"], json!([]));

    let theirs = [("authorization", "Bearer b")];
    let body = prompt("", json!({"state": state}));
    let refused = app.send(Method::POST, "/v1/completions", body, &theirs).await;
    assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "state".into()));
    let mut changed = state.into_bytes();
    changed[1000] = if changed[1000] == b'A' { b'B' } else { b'A' };
    let changed = String::from_utf8(changed).unwrap();
    let refused = app.post("/v1/completions", prompt("", json!({"state": changed}))).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST);
    let keyless = crate::common::sessions::app().await;
    let refused = keyless.post("/v1/completions", prompt("A", json!({"return_state": true}))).await;
    assert_eq!(refused.status, StatusCode::NOT_IMPLEMENTED);
    // A body that is not JSON is refused as such.
    let broken = app.raw(Method::POST, "/v1/sessions", Body::from("{"), &[("content-type", "application/json")]).await;
    assert_eq!(broken.status, StatusCode::BAD_REQUEST);
}
