//! Every feature of the server with several model families: a text is the same with the feature as without it.

use std::path::Path;

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

use super::candle;
use super::mixer_sessions::mamba2;
use crate::common::random::{written, written_rwkv7};
use crate::common::sessions::{Answer, App, app_on, ids, ok, prompt, session, state_of};
use crate::common::{events, with};

const TEXT: &str = "the fox said: how deep is the river?";

#[tokio::test]
async fn rfa_gate_has_every_feature() {
    every_feature(written(&json!({})).path()).await;
}

#[tokio::test]
async fn rwkv7_has_every_feature() {
    every_feature(written_rwkv7().path()).await;
}

#[tokio::test]
async fn mamba2_has_every_feature() {
    every_feature(written(&mamba2()).path()).await;
}

#[tokio::test]
async fn a_family_of_candles_has_every_feature() {
    every_feature(candle::written("rwkv6").path()).await;
}

/// Two servers with the same model and secret, and the text that the model generates in one request.
struct Servers {
    here: App,
    there: App,
    /// An answer of 24 tokens.
    whole: Value,
}

async fn every_feature(model: &Path) {
    let options = || OpenOptions { slots: 4, secret: Some(vec![7; 32]), ..OpenOptions::default() };
    let [here, there] = [app_on(model, options(), Location::Memory), app_on(model, options(), Location::Memory)];
    let (here, there) = (here.await, there.await);
    let whole = ok(&here, "/v1/completions", sampled(json!({"seed": 3, "max_tokens": 24}))).await;
    assert_eq!(ids(&whole).len(), 24, "{whole}");
    let servers = Servers { here, there, whole };
    turns_fork_and_rewind(&servers).await;
    a_file_moves(&servers).await;
    a_sealed_state_moves(&servers).await;
    a_cut_stream_is_resumed(&servers).await;
    several_texts(&servers).await;
    a_schema_is_kept(&servers).await;
}

/// Returns a sampled request for 8 tokens.
fn sampled(more: Value) -> Value {
    prompt(TEXT, with(json!({"temperature": 1.0, "ignore_eos": true}), more))
}

fn path(session: &Value) -> String {
    format!("/v1/sessions/{}", session["id"].as_str().unwrap())
}

/// Generates the next 8 tokens of a session.
async fn turn(app: &App, session: &Value, text: &str) -> Value {
    ok(app, "/v1/completions", sampled(json!({"prompt": text, "session": session["id"]}))).await
}

impl Servers {
    /// Returns the tokens of the text's n-th third, counted from 0.
    fn third(&self, n: usize) -> Vec<u64> {
        ids(&self.whole)[8 * n..][..8].to_vec()
    }

    /// Creates a session, generates the first third, and returns the session and the answer.
    async fn begun(&self) -> (Value, Value) {
        let made = session(&self.here, json!({"seed": 3})).await;
        let first = turn(&self.here, &made, TEXT).await;
        assert_eq!(ids(&first), self.third(0));
        (made, first)
    }
}

async fn turns_fork_and_rewind(servers: &Servers) {
    let (here, (made, first)) = (&servers.here, servers.begun().await);
    let fork = ok(here, &format!("{}/fork", path(&made)), json!({})).await["data"][0].clone();
    for n in [1, 2] {
        assert_eq!(ids(&turn(here, &made, "").await), servers.third(n));
    }
    assert_eq!(ids(&turn(here, &fork, "").await), servers.third(1));
    ok(here, &format!("{}/rewind", path(&made)), json!({"version": first["session"]["version"]})).await;
    for session in [&made, &fork] {
        let before = if session == &made { 1 } else { 2 };
        assert_eq!(ids(&turn(here, session, "").await), servers.third(before));
    }
}

async fn a_file_moves(servers: &Servers) {
    let (Servers { here, there, .. }, (made, _)) = (servers, servers.begun().await);
    let file = here.get(&format!("{}/snapshot", path(&made))).await.body;
    let moved = there.upload(file).await;
    assert_eq!(moved.status, StatusCode::CREATED, "{}", moved.text());
    let moved = moved.json();
    for n in [1, 2] {
        assert_eq!(ids(&turn(there, &moved, "").await), servers.third(n));
        turn(here, &made, "").await;
    }
    let [stayed, went] =
        [here.get(&format!("{}/snapshot", path(&made))).await, there.get(&format!("{}/snapshot", path(&moved))).await];
    assert!(state_of(&stayed.body) == state_of(&went.body), "a bit differs");
}

/// The client keeps the sealed state and continues on the other server each time.
async fn a_sealed_state_moves(servers: &Servers) {
    let first = sampled(json!({"seed": 3, "return_state": true}));
    let mut answer = ok(&servers.here, "/v1/completions", first).await;
    assert_eq!(ids(&answer), servers.third(0));
    for (n, app) in [(1, &servers.there), (2, &servers.here)] {
        let more = sampled(json!({"prompt": "", "state": answer["state"], "return_state": true}));
        answer = ok(app, "/v1/completions", more).await;
        assert_eq!(ids(&answer), servers.third(n));
    }
    assert!(answer["session"].is_null() && answer["state"].is_string(), "{answer}");
}

/// Returns the numbers and texts of a stream's events.
fn read(stream: &str) -> Vec<(u64, String)> {
    let number = |lines: &str| lines.lines().find_map(|line| line.strip_prefix("id: ")?.parse().ok());
    let data = |lines: &str| {
        let data = lines.lines().find_map(|line| line.strip_prefix("data: "))?;
        let chunk: Value = serde_json::from_str(data).ok()?;
        chunk["choices"][0]["text"].as_str().map(str::to_owned)
    };
    stream.split("\n\n").filter_map(|event| Some((number(event)?, data(event)?))).collect()
}

async fn a_cut_stream_is_resumed(servers: &Servers) {
    let app = &servers.here;
    let made = session(app, json!({"seed": 3})).await;
    let more = json!({"session": made["id"], "max_tokens": 24, "stream": true, "on_disconnect": "continue"});
    let mut cut = app.open("/v1/completions", sampled(more), &[]).await;
    let stream = format!("/v1/streams/{}", cut.header("x-stream-id"));
    cut.read_some().await;
    drop(cut);
    let all = read(&app.get(&stream).await.text());
    let text = |events: &[(u64, String)]| events.iter().map(|(_, text)| text.as_str()).collect::<String>();
    assert_eq!(text(&all), servers.whole["choices"][0]["text"]);
    let (last, _) = all[all.len() / 2];
    let rest: Answer = app.send(Method::GET, &stream, Value::Null, &[("last-event-id", &last.to_string())]).await;
    let seen: Vec<_> = all.iter().filter(|(number, _)| *number <= last).cloned().collect();
    assert_eq!(text(&seen) + &text(&read(&rest.text())), text(&all));
    let after = app.until_free(&path(&made)).await;
    let tokens = servers.whole["usage"]["total_tokens"].as_u64();
    assert_eq!(after["tokens"].as_u64(), tokens, "{after}");
}

async fn several_texts(servers: &Servers) {
    let both = ok(&servers.there, "/v1/completions", sampled(json!({"seed": 3, "max_tokens": 24, "n": 2}))).await;
    let second = ok(&servers.there, "/v1/completions", sampled(json!({"seed": 4, "max_tokens": 24}))).await;
    for (choice, alone) in [(0, &servers.whole), (1, &second)] {
        for part in ["text", "token_ids"] {
            assert_eq!(both["choices"][choice][part], alone["choices"][0][part], "choice {choice}");
        }
    }
    assert_ne!(ids(&second), ids(&servers.whole));
}

/// With a schema, the object is the same in a whole answer, as a stream, in a session and among several texts.
async fn a_schema_is_kept(servers: &Servers) {
    let app = &servers.here;
    let schema = json!({"type": "object", "required": ["deep"], "additionalProperties": false,
        "properties": {"deep": {"enum": ["sea", "river", "well"]}}});
    let kept =
        with(sampled(json!({"seed": 5, "max_tokens": 200, "ignore_eos": false})), json!({"json_schema": schema}));
    let alone = ok(app, "/v1/completions", kept.clone()).await;
    let text = alone["choices"][0]["text"].as_str().unwrap();
    let object: Value = serde_json::from_str(text).unwrap_or_else(|_| panic!("no JSON: {alone}"));
    assert!(["sea", "river", "well"].iter().any(|word| object == json!({"deep": word})), "{alone}");
    assert_eq!(alone["choices"][0]["finish_reason"], "stop");

    let streamed = app.post("/v1/completions", with(kept.clone(), json!({"stream": true}))).await;
    assert!(events(&streamed.text()).len() > 2 && streamed.texts().0 == text, "{}", streamed.text());
    let made = session(app, json!({"seed": 5})).await;
    let mut in_session = with(kept.clone(), json!({"session": made["id"]}));
    in_session.as_object_mut().unwrap().remove("seed");
    assert_eq!(ok(app, "/v1/completions", in_session).await["choices"][0]["text"], text);
    let several = ok(app, "/v1/completions", with(kept, json!({"n": 2, "seed": 4}))).await;
    assert_eq!(several["choices"][1]["text"], text);
}
