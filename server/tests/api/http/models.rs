//! Several models in one server: which one answers a request, and which of them are loaded.

use std::io::Write;
use std::sync::atomic::Ordering;

use axum::http::Method;
use futures_util::StreamExt;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tidegate_server::api::Keys;

use crate::common::models::{ONE, Several, several, write};
use crate::common::sessions::prompt;
use crate::common::with;

const ALL: u64 = u64::MAX;

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(name, state)| ((*name).to_owned(), (*state).to_owned())).collect()
}

async fn answers(app: &Several, path: &str, body: Value) -> String {
    app.post(path, body).await.ok()["model"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_request_selects_its_model_by_name_in_every_format() {
    let app = several(&["a", "b"], ALL, false).await;
    assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("b", "loaded")]));
    let messages = json!([{"role": "user", "content": "Once"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 1})),
        ("/v1/responses", json!({"input": "Once", "max_output_tokens": 1})),
        ("/completion", json!({"prompt": "Once", "n_predict": 1})),
    ] {
        assert_eq!(answers(&app, path, body.clone()).await, "a", "{path}");
        for name in ["a", "b"] {
            assert_eq!(answers(&app, path, with(body.clone(), json!({"model": name}))).await, name, "{path}");
        }
    }
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 1})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})),
        ("/v1/responses", json!({"input": "Once"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 1})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/v1/chat/completions/input_tokens", json!({"messages": messages})),
        ("/v1/responses/input_tokens", json!({"input": "Once"})),
        ("/tokenize", json!({"content": "Once"})),
        ("/v1/sessions", json!({})),
    ] {
        let refused = app.post(path, with(body, json!({"model": "c"}))).await;
        assert_eq!(refused.status, 404, "{path}");
        assert!(refused.text.contains("this server has `a`, `b`"), "{path}: {}", refused.text);
    }
    for (path, body) in [
        ("/v1/chat/completions/input_tokens", json!({"messages": messages, "model": "b"})),
        ("/v1/responses/input_tokens", json!({"input": "Once"})),
    ] {
        assert!(app.post(path, body).await.ok()["input_tokens"].as_u64() > Some(0), "{path}");
    }
    let session = app.post("/v1/sessions", json!({"model": "b", "text": "Once"})).await.ok();
    let path = format!("/v1/sessions/{0}/diff?from={0}", session["id"].as_str().expect("an id"));
    assert_eq!(app.get(&path).await.ok()["object"], "session.diff");
    assert_eq!(app.get("/v1/models/c").await.refusal(), (404, "model_not_found".into()));
    assert_eq!(app.get("/props?model=b").await.ok()["model_alias"], "b");
    for path in ["/health", "/ready", "/openapi.json"] {
        app.get(path).await.ok();
    }
}

#[tokio::test]
async fn any_name_may_mean_the_first_model() {
    let app = several(&["a", "b"], ALL, true).await;
    for (name, model) in [("tgi", "a"), ("https://example.org/v1", "a"), ("a", "a"), ("b", "b")] {
        let body = json!({"prompt": "Once", "max_tokens": 1, "model": name});
        assert_eq!(answers(&app, "/v1/completions", body).await, model, "{name}");
    }
    // Looking up a model takes its real name.
    assert_eq!(app.get("/v1/models/tgi").await.refusal(), (404, "model_not_found".into()));
}

#[tokio::test]
async fn a_session_belongs_to_the_model_that_made_it() {
    let app = several(&["a", "b"], ALL, false).await;
    let session = app.post("/v1/sessions", json!({"model": "b", "text": "Once upon"})).await.ok();
    let id = session["id"].as_str().unwrap();
    assert_eq!(app.get(&format!("/v1/sessions/{id}")).await.ok()["id"], id);
    assert_eq!(answers(&app, "/v1/completions", prompt(" a", json!({"session": id}))).await, "b");
    let refused = app.post("/v1/completions", prompt(" a", json!({"session": id, "model": "a"}))).await;
    assert_eq!((refused.status.as_u16(), &refused.json()["error"]["param"]), (400, &json!("model")));
    assert!(refused.text.contains("belongs to the model `b`"), "{}", refused.text);
    let listed =
        async |query: &str| app.get(&format!("/v1/sessions{query}")).await.ok()["data"].as_array().unwrap().len();
    assert_eq!((listed("").await, listed("?model=a").await, listed("?model=b").await), (0, 0, 1));
    let append = app.post(&format!("/v1/sessions/{id}/append"), json!({"text": " more"})).await;
    append.ok();
    let fork = app.post(&format!("/v1/sessions/{id}/fork"), json!({})).await.ok();
    let fork = fork["data"][0]["id"].as_str().unwrap().to_owned();
    app.get(&format!("/v1/sessions/{fork}/text")).await.ok();
    let deleted = app.request(Method::DELETE, &format!("/v1/sessions/{id}"), &Value::Null, &[]).await;
    deleted.ok();
    assert_eq!(app.get(&format!("/v1/sessions/{id}")).await.refusal(), (404, "not_found".into()));
    // A stored response belongs to its model, too.
    let first = app.post("/v1/responses", json!({"input": "Once", "max_output_tokens": 2, "model": "b"})).await.ok();
    let next = json!({"input": " more", "max_output_tokens": 1, "previous_response_id": first["id"]});
    assert_eq!(answers(&app, "/v1/responses", next).await, "b");
    app.get(&format!("/v1/responses/{}", first["id"].as_str().unwrap())).await.ok();
}

#[tokio::test]
async fn the_model_that_was_not_used_for_longest_makes_room_and_its_sessions_go_on() {
    let app = several(&["a", "b"], ONE, false).await;
    // Both were loaded at the start, the first one last.
    assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("b", "unloaded")]));
    let alone = several(&["x", "b"], ALL, false).await;
    let (mut texts, mut expected) = (Vec::new(), Vec::new());
    for (app, texts, disturbed) in [(&app, &mut texts, true), (&alone, &mut expected, false)] {
        let session = app.post("/v1/sessions", json!({"model": "b", "seed": 7})).await.ok()["id"].clone();
        for text in ["Once upon a time", " Then", " At last"] {
            let more = json!({"session": session, "temperature": 1});
            let answer = app.post("/v1/completions", prompt(text, more)).await.ok();
            texts.push(answer["choices"][0]["token_ids"].clone());
            if disturbed {
                assert_eq!(answers(app, "/v1/completions", prompt("x", json!({"model": "a"}))).await, "a");
                assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("b", "unloaded")]));
                // Reading the session's text needs no engine.
                let read = app.get(&format!("/v1/sessions/{}/text", session.as_str().unwrap())).await.ok();
                assert!(read["text"].as_str().unwrap().starts_with("Once upon a time"));
                assert_eq!(app.state_of("b").await, "unloaded");
            }
        }
    }
    assert_eq!(texts, expected, "bit for bit");
    assert_eq!((app.loads("b"), alone.loads("b")), (4, 1));
    let metrics = app.get("/metrics").await.text;
    for line in [
        "tidegate_model_state{model=\"b\",state=\"unloaded\"} 1",
        "tidegate_model_loads_total{model=\"b\"} 4",
        "tidegate_model_unloads_total{model=\"b\"} 4",
        "tidegate_slots{model=\"a\"} 4",
        "tidegate_sessions{model=\"b\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    assert_eq!(metrics.matches("# TYPE tidegate_sessions ").count(), 1);
    assert!(!metrics.contains("tidegate_slots{model=\"b\"}"), "it has no engine");
}

#[tokio::test]
async fn each_use_counts_for_the_order_of_unloading() {
    // Two models fit, and the first was loaded last.
    let app = several(&["a", "b", "c"], ONE * 3 / 2, false).await;
    assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("b", "loaded"), ("c", "unloaded")]));
    for name in ["b", "c"] {
        assert_eq!(answers(&app, "/v1/completions", prompt("x", json!({"model": name}))).await, name);
    }
    assert_eq!(app.states().await, pairs(&[("a", "unloaded"), ("b", "loaded"), ("c", "loaded")]));
}

#[tokio::test]
async fn requests_that_wait_for_the_same_model_load_it_once() {
    let app = several(&["a", "b"], ONE, false).await;
    let before = app.loads("b");
    let body = json!({"prompt": "Once", "max_tokens": 1, "model": "b"});
    let answers = join_all((0..8).map(|_| app.post("/v1/completions", body.clone()))).await;
    assert!(answers.iter().all(|answer| answer.ok()["model"] == "b"));
    assert_eq!(app.loads("b"), before + 1);
}

#[tokio::test]
async fn a_model_with_a_running_request_is_not_unloaded() {
    let app = several(&["a", "b"], ONE, false).await;
    let body = json!({"prompt": "Once", "max_tokens": 100_000, "stream": true, "ignore_eos": true});
    let mut stream = app.stream(&body).await;
    stream.next().await.unwrap().unwrap();
    let other = json!({"prompt": "Once", "max_tokens": 1, "model": "b"});
    let refused = app.post("/v1/completions", other.clone()).await;
    assert_eq!(refused.refusal(), (503, "models_busy".into()));
    assert_eq!(refused.headers["retry-after"], "5");
    assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("b", "unloaded")]));
    stream.next().await.unwrap().unwrap();
    drop(stream);
    assert_eq!(answers(&app, "/v1/completions", other).await, "b");
    assert_eq!(app.states().await, pairs(&[("a", "unloaded"), ("b", "loaded")]));
    // The first model is loaded again when it is needed, so the server is ready.
    app.get("/ready").await.ok();
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_is_named_and_not_tried_for_each_request() {
    let app = several(&["a", "b"], ALL, false).await;
    let names = ["a", "b", "broken"];
    std::fs::create_dir(app.folder("broken")).unwrap();
    std::fs::copy(app.folder("a").join("config.json"), app.folder("broken").join("config.json")).unwrap();
    assert!(app.state.reload_models(app.sources(&names, 0)).await.is_empty());
    assert_eq!(app.state_of("broken").await, "failed");
    let attempts = app.loader.attempts.load(Ordering::SeqCst);
    for _ in 0..3 {
        let refused = app.post("/v1/completions", json!({"prompt": "x", "model": "broken"})).await;
        assert_eq!(refused.refusal(), (503, "model_failed".into()));
        assert!(refused.text.contains("model.safetensors"), "{}", refused.text);
        assert_eq!(refused.headers["retry-after"], "30");
    }
    assert_eq!(app.loader.attempts.load(Ordering::SeqCst), attempts);
    assert_eq!(answers(&app, "/v1/completions", prompt("x", json!({"model": "b"}))).await, "b");
}

#[tokio::test]
async fn a_model_larger_than_the_budget_is_refused_by_name() {
    let app = several(&["a"], ONE, false).await;
    let large = app.folder("large");
    write(&large, 1);
    let weights = large.join("model.safetensors");
    std::fs::remove_file(&weights).unwrap();
    std::fs::File::create(&weights).unwrap().set_len(1 << 30).unwrap();
    app.state.reload_models(app.sources(&["a", "large"], 0)).await;
    let refused = app.post("/v1/completions", json!({"prompt": "x", "model": "large"})).await;
    assert_eq!(refused.refusal(), (503, "model_failed".into()));
    assert!(refused.text.contains("--ram-budget leaves 24 MiB"), "{}", refused.text);
    assert_eq!(app.state_of("a").await, "loaded");
}

#[tokio::test]
async fn a_key_may_be_for_some_models() {
    let app = several(&["a", "b"], ALL, false).await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let keys = json!({"keys": [
        {"name": "all", "key": "sk-0123456789-all"},
        {"name": "one", "key": "sk-0123456789-one", "models": ["b"]},
    ]});
    file.write_all(keys.to_string().as_bytes()).unwrap();
    app.state.set_api_keys(Keys::load(Some(file.path()), &[]).unwrap().unwrap());
    let (all, one) = ([("x-api-key", "sk-0123456789-all")], [("x-api-key", "sk-0123456789-one")]);
    let listed = app.request(Method::GET, "/v1/models", &Value::Null, &one).await.ok();
    assert_eq!((listed["data"].as_array().unwrap().len(), &listed["data"][0]["id"]), (1, &json!("b")));
    let body = |more: Value| prompt("Once", more);
    for (key, more, model) in [
        (&all, json!({}), Ok("a")),
        (&all, json!({"model": "b"}), Ok("b")),
        // The first model that the key may use.
        (&one, json!({}), Ok("b")),
        (&one, json!({"model": "b"}), Ok("b")),
        (&one, json!({"model": "a"}), Err((403, "insufficient_scope"))),
        (&one, json!({"model": "c"}), Err((404, "model_not_found"))),
    ] {
        let answer = app.request(Method::POST, "/v1/completions", &body(more.clone()), key).await;
        match model {
            Ok(model) => assert_eq!(answer.ok()["model"], model, "{more}"),
            Err((status, code)) => assert_eq!(answer.refusal(), (status, code.into()), "{more}"),
        }
        assert!(model.is_ok() || !answer.text.contains("`a`, "), "the names of others: {}", answer.text);
    }
    for path in ["/v1/models/a", "/props?model=a", "/v1/sessions?model=a"] {
        assert_eq!(app.request(Method::GET, path, &Value::Null, &one).await.status, 403, "{path}");
    }
}

#[tokio::test]
async fn a_reload_serves_new_requests_and_running_streams_end_where_they_are() {
    let app = several(&["a", "b"], ALL, false).await;
    let body = json!({"prompt": "Once", "max_tokens": 400, "stream": true, "ignore_eos": true});
    let (mut stream, mut streamed) = (app.stream(&body).await, String::new());
    streamed += &String::from_utf8_lossy(&stream.next().await.unwrap().unwrap());
    let mark = async || app.post("/v1/completions", prompt("x", json!({}))).await.ok()["system_fingerprint"].clone();
    let before = mark().await;
    write(&app.folder("a"), 5);
    write(&app.folder("c"), 6);
    let mut list = app.sources(&["a"], 1);
    list.extend(app.sources(&["c"], 0));
    assert_eq!(app.state.reload_models(list.clone()).await, ["a", "c"]);
    assert_eq!(app.states().await, pairs(&[("a", "loaded"), ("c", "loaded")]));
    let after = mark().await;
    assert_ne!(before, after);
    let gone = app.post("/v1/completions", prompt("x", json!({"model": "b"}))).await;
    assert_eq!(gone.refusal(), (404, "model_not_found".into()));
    while let Some(chunk) = stream.next().await {
        streamed += &String::from_utf8_lossy(&chunk.unwrap());
    }
    assert!(streamed.trim_end().ends_with("data: [DONE]"), "{streamed}");
    assert!(streamed.contains("\"finish_reason\":\"length\"") && !streamed.contains(after.as_str().unwrap()));
    // Nothing has changed, so nothing is loaded.
    let loads = app.loader.loads.lock().unwrap().len();
    assert!(app.state.reload_models(list.clone()).await.is_empty());
    // A broken folder changes nothing.
    std::fs::write(app.folder("a").join("config.json"), "{").unwrap();
    list[0].stamp = 2;
    assert!(app.state.reload_models(list).await.is_empty());
    assert_eq!(app.loader.loads.lock().unwrap().len(), loads);
    assert_eq!(mark().await, after);
}

#[tokio::test]
async fn a_server_that_shuts_down_waits_for_the_engines_of_all_models() {
    let app = several(&["a", "b"], ALL, false).await;
    let stream = app.stream(&json!({"prompt": "x", "max_tokens": 8, "stream": true, "model": "b"})).await;
    app.state.drain();
    assert_eq!(app.post("/v1/completions", json!({"prompt": "x"})).await.refusal(), (503, "shutting_down".into()));
    let text: Vec<_> = stream.collect().await;
    assert!(String::from_utf8_lossy(text.last().unwrap().as_ref().unwrap()).contains("[DONE]"));
    app.state.engines_ended().await;
    app.state.settle().await;
    app.state.close().await;
}
