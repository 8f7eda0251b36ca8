//! Several texts for one turn of a session: `n` with `keep`.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::common::sessions::{App, app, prompt, quiet, session};
use crate::common::{events, with};

fn path(session: &Value) -> String {
    format!("/v1/sessions/{}", session["id"].as_str().unwrap())
}

/// Returns a turn of 12 tokens at temperature 1.
fn turn(session: &Value, more: Value) -> Value {
    let warm = json!({"session": session["id"], "max_tokens": 12, "temperature": 1.0, "ignore_eos": true});
    with(prompt(" and the hare", warm), more)
}

async fn take(app: &App, body: Value) -> Value {
    let answer = app.post("/v1/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn texts(answer: &Value) -> Vec<&str> {
    answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect()
}

fn means(answer: &Value) -> Vec<f64> {
    answer["choices"].as_array().unwrap().iter().map(|choice| choice["mean_logprob"].as_f64().unwrap()).collect()
}

fn likeliest(means: &[f64]) -> usize {
    (0..means.len()).rev().max_by(|a, b| means[*a].total_cmp(&means[*b])).unwrap()
}

async fn fork(app: &App, session: &Value) -> Value {
    app.post(&format!("{}/fork", path(session)), json!({})).await.json()["data"][0].clone()
}

#[tokio::test]
async fn the_texts_of_one_turn_are_those_of_forks_that_run_one_at_a_time() {
    let app = quiet().await;
    let made = session(&app, json!({"text": "The fox said to the hare that it was late", "seed": 3})).await;
    let (mut alone, mut forks) = (Vec::new(), Vec::new());
    let mut read = 0;
    for seed in 7..11 {
        let fork = fork(&app, &made).await;
        let before = app.engine_stats().prompt_tokens;
        alone.push(take(&app, turn(&fork, json!({"seed": seed, "logprobs": 0}))).await);
        read = app.engine_stats().prompt_tokens - before;
        forks.push(fork);
    }
    let (before, stats) = (app.engine_stats().prompt_tokens, app.store.stats());
    let whole = take(&app, turn(&made, json!({"seed": 7, "n": 4, "keep": "all", "label": "tried"}))).await;
    assert!(read > 4);
    // The first step of each text reads the last token of the prompt.
    assert_eq!(app.engine_stats().prompt_tokens - before, read + 3, "the prompt is read once for all");
    let now = app.store.stats();
    assert_eq!((now.transactions, now.sessions), (stats.transactions + 1, stats.sessions + 3), "all at once");

    assert_eq!(texts(&whole), alone.iter().map(|one| texts(one)[0]).collect::<Vec<_>>());
    for (at, one) in alone.iter().enumerate() {
        let listed = one["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        let sum: f64 = listed.iter().filter_map(Value::as_f64).sum();
        assert!((means(&whole)[at] - sum / listed.len() as f64).abs() < 1e-6, "{whole} {one}");
        assert_eq!(whole["choices"][at]["logprobs"], Value::Null, "they are not listed");
    }
    let chosen = likeliest(&means(&whole));
    let info = &whole["session"];
    assert_eq!((&info["chosen"], &info["parent"]), (&json!(chosen), &made["version"]));
    let kept = info["forks"].as_array().unwrap();
    let others: Vec<usize> = (0..4).filter(|at| *at != chosen).collect();
    assert_eq!(kept.iter().map(|fork| fork["index"].as_u64().unwrap() as usize).collect::<Vec<_>>(), others);

    // Each text continues like the fork that generated it alone.
    let head = app.get(&path(&made)).await.json();
    assert_eq!((&head["version"], &head["label"]), (&info["version"], &json!("tried")));
    let more = |id: &Value| prompt("", json!({"session": id, "temperature": 1.0}));
    let again = take(&app, more(&made["id"])).await;
    assert_eq!(texts(&again), texts(&take(&app, more(&forks[chosen]["id"])).await));
    for fork in kept {
        let found = app.get(&path(fork)).await.json();
        assert_eq!((&found["version"], &found["forked_from"]["session"]), (&fork["version"], &made["id"]));
        assert_eq!((&found["parent"], &found["label"]), (&made["version"], &Value::Null));
        let single = &forks[fork["index"].as_u64().unwrap() as usize]["id"];
        assert_eq!(texts(&take(&app, more(&fork["id"])).await), texts(&take(&app, more(single)).await));
    }
}

#[tokio::test]
async fn without_a_seed_the_texts_differ_and_can_be_repeated() {
    let app = quiet().await;
    let made = session(&app, json!({"text": "The fox said", "seed": 3})).await;
    let single = take(&app, turn(&fork(&app, &made).await, json!({}))).await;
    let stats = app.store.stats();
    let none = turn(&made, json!({"n": 3, "keep": "none"}));
    let first = take(&app, none.clone()).await;
    assert_eq!(texts(&first)[0], texts(&single)[0], "the first draws from the session's own random numbers");
    assert_ne!(texts(&first)[0], texts(&first)[1]);
    assert_ne!(texts(&first)[1], texts(&first)[2]);
    let again = app.post("/v1/completions", none).await;
    assert_eq!(texts(&again.json()), texts(&first), "the session is where it was");
    let info = &again.json()["session"];
    assert_eq!((&info["version"], &info["parent"]), (&made["version"], &made["version"]));
    assert_eq!((&info["chosen"], &info["forks"]), (&Value::Null, &Value::Null));
    assert_eq!(again.header("x-session-version"), made["version"].as_str().unwrap());
    let now = app.store.stats();
    assert_eq!((now.transactions, now.versions, now.sessions), (stats.transactions, stats.versions, stats.sessions));
    assert_eq!(app.get(&path(&made)).await.json()["in_use"], false);

    let best = app.post("/v1/completions", turn(&made, json!({"n": 3, "keep": "best"}))).await;
    assert_eq!(best.header("x-session-version"), best.json()["session"]["version"].as_str().unwrap());
    let best = best.json();
    assert_eq!((texts(&best), means(&best)), (texts(&first), means(&first)));
    assert_eq!(best["session"]["chosen"], likeliest(&means(&best)));
    assert_eq!(best["session"]["forks"], Value::Null);
    let after = app.store.stats();
    assert_eq!((after.versions, after.sessions), (now.versions + 1, now.sessions), "the others are gone");
    // Of equally likely texts, the first is chosen.
    let equal = take(&app, turn(&made, json!({"n": 3, "keep": "best", "temperature": 0}))).await;
    assert_eq!(equal["session"]["chosen"], 0);
    let one = take(&app, turn(&made, json!({"keep": "all"}))).await;
    assert_eq!((&one["session"]["chosen"], &one["session"]["forks"]), (&json!(0), &json!([])));
}

#[tokio::test]
async fn a_stream_says_at_its_end_what_was_kept_and_a_retry_says_the_same() {
    let app = app().await;
    let made = session(&app, json!({"text": "The fox said", "seed": 3})).await;
    let twin = fork(&app, &made).await;
    let whole = take(&app, turn(&twin, json!({"n": 3, "keep": "all", "seed": 5}))).await;
    let body = turn(&made, json!({"n": 3, "keep": "all", "seed": 5, "stream": true}));
    let key = [("idempotency-key", "one")];
    let answer = app.send(Method::POST, "/v1/completions", body.clone(), &key).await;
    let text = answer.text();
    let chunks: Vec<Value> = events(&text).iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
    let (mut joined, mut found) = (vec![String::new(); 3], vec![0.0; 3]);
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        joined[index] += choice["text"].as_str().unwrap();
        if !choice["finish_reason"].is_null() {
            found[index] = choice["mean_logprob"].as_f64().unwrap();
        }
    }
    assert_eq!((joined.iter().map(String::as_str).collect(), &found), (texts(&whole), &means(&whole)));
    let (last, before) = chunks.split_last().unwrap();
    assert!(before.iter().all(|chunk| chunk["session"].is_null()), "{text}");
    let info = &last["session"];
    assert_eq!((&info["chosen"], &info["tokens"]), (&whole["session"]["chosen"], &whole["session"]["tokens"]));
    assert_eq!(answer.header("x-session-version"), info["version"].as_str().unwrap());
    for fork in info["forks"].as_array().unwrap() {
        assert_eq!(app.get(&path(fork)).await.json()["version"], fork["version"]);
    }
    let sessions = app.store.stats().sessions;
    let again = app.send(Method::POST, "/v1/completions", body, &key).await;
    let repeated: Value = serde_json::from_str(events(&again.text())[0]).unwrap();
    assert_eq!((&repeated["session"], texts(&repeated)), (info, joined.iter().map(String::as_str).collect()));
    assert_eq!(app.store.stats().sessions, sessions, "nothing happens twice");
}

#[tokio::test]
async fn a_disconnect_rolls_all_texts_back_or_keeps_what_there_is() {
    let app = app().await;
    for (on_disconnect, more) in [("rollback", 0), ("commit", 2)] {
        let made = session(&app, json!({"text": "The fox said"})).await;
        let sessions = app.store.stats().sessions;
        let long = json!({"n": 3, "keep": "all", "stream": true, "max_tokens": 50_000, "on_disconnect": on_disconnect});
        let mut running = app.open("/v1/completions", turn(&made, long), &[]).await;
        running.read_some().await;
        drop(running);
        let after = app.until_free(&path(&made)).await;
        assert_eq!(app.store.stats().sessions - sessions, more, "{on_disconnect}");
        assert_eq!(after["version"] == made["version"], more == 0, "{on_disconnect}");
    }
}

#[tokio::test]
async fn a_chat_keeps_the_best_of_several_answers() {
    let app = app().await;
    let made = session(&app, json!({})).await;
    let body = json!({"messages": [{"role": "user", "content": "Tell me of the sea."}], "session": made["id"],
        "max_tokens": 8, "temperature": 1.0, "seed": 2, "n": 3, "keep": "best"});
    let answer = app.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let answer = answer.json();
    assert_eq!(answer["session"]["chosen"], likeliest(&means(&answer)));
    let made = session(&app, json!({})).await;
    let streamed = with(body, json!({"session": made["id"], "stream": true}));
    let text = app.post("/v1/chat/completions", streamed).await.text();
    let chunks: Vec<Value> = events(&text).iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
    assert_eq!(chunks.last().unwrap()["session"]["chosen"], answer["session"]["chosen"], "{text}");
    let listed = chunks.iter().filter(|chunk| chunk["choices"][0]["mean_logprob"].is_f64());
    assert_eq!(listed.count(), 3, "{text}");
}

#[tokio::test]
async fn what_cannot_be_kept_is_refused() {
    let app = app().await;
    let made = session(&app, json!({"text": "The fox said"})).await;
    let states = (64 << 20) / made["state_bytes"].as_u64().unwrap() + 1;
    for (body, param, said) in [
        (turn(&made, json!({"n": 2})), "n", "keep (best, all or none)"),
        (turn(&made, json!({"best_of": 2})), "best_of", "keep (best, all or none)"),
        (turn(&made, json!({"best_of": 2, "keep": "best"})), "best_of", "equal to n"),
        (turn(&made, json!({"keep": "some"})), "keep", "one of: best, all, none"),
        (turn(&made, json!({"keep": "none", "label": "x"})), "label", "keep: none"),
        (prompt("A", json!({"n": 2, "keep": "best"})), "keep", "without a session"),
    ] {
        let refused = app.post("/v1/completions", body).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, param.into()), "{}", refused.text());
        assert!(refused.text().contains(said), "{}", refused.text());
    }
    if states < 128 {
        let best = json!({"n": 128, "keep": "best", "stream": true});
        for (body, asked) in [(json!({"n": 128, "keep": "all"}), "keep: all"), (best, "keep: best and stream: true")] {
            let refused = app.post("/v1/completions", turn(&made, body.clone())).await;
            assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "n".into()), "{}", refused.text());
            assert!(refused.text().contains(&format!("at most {states} with {asked}, found")), "{}", refused.text());
            // A response with an idempotency key is held until its end, but its stream waits for a reader like any
            // other, so the limit is the same.
            let keyed =
                app.send(Method::POST, "/v1/completions", turn(&made, body), &[("idempotency-key", "one")]).await;
            assert_eq!((keyed.status, keyed.text()), (refused.status, refused.text()));
        }
    }
    assert_eq!(app.get(&path(&made)).await.json()["version"], made["version"]);
    let elsewhere = json!({"messages": [{"role": "user", "content": "A"}], "max_tokens": 2, "keep": "best"});
    let refused = app.post("/v1/messages", elsewhere).await;
    assert_eq!(refused.status, StatusCode::BAD_REQUEST, "{}", refused.text());
}
