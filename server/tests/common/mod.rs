//! Helpers for the server's tests: an application with the shipped checkpoint or a scripted model, and requests to it.
#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod fake;
pub(crate) mod fuzz;
pub(crate) mod models;
pub(crate) mod parrot;
pub(crate) mod pieces;
pub(crate) mod random;
pub(crate) mod responses;
pub(crate) mod runs;
pub(crate) mod sessions;
pub(crate) mod slow;
pub(crate) mod translator;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, Response, StatusCode, header};
use serde_json::Value;
use tidegate_model::{SamplingParams, StateLayout};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{EngineHandle, EngineOptions, EngineThread, Limits, spawn};
use tidegate_server::ram::ModelMemory;
use tidegate_server::session::{Codec, Fingerprint, PrefixIndex};
use tidegate_server::text::{Grammars, Tokenizer};
use tidegate_server::{ApiOptions, AppState, Served, app};
use tower::ServiceExt;

use fake::{Fake, rules};

/// Returns the folder of the shipped checkpoint.
pub(crate) fn checkpoint() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny")
}

/// Returns an application with the shipped checkpoint, which is loaded once per test binary.
pub(crate) fn shipped() -> AppState {
    static STATE: LazyLock<AppState> = LazyLock::new(|| {
        let (served, _thread) = open(&checkpoint(), &OpenOptions::default()).unwrap();
        let state = AppState::new(ApiOptions::default());
        state.serve(served);
        state
    });
    STATE.clone()
}

/// Starts an application with a scripted model.
pub(crate) fn scripted(fake: Fake, queue: usize) -> (AppState, EngineHandle, EngineThread) {
    let options = EngineOptions { queue, ..EngineOptions::default() };
    let (engine, thread) = spawn(fake, rules(), options).unwrap();
    let state = AppState::new(ApiOptions { max_body_bytes: 10_000, ..ApiOptions::default() });
    state.serve(served(engine.clone()));
    (state, engine, thread)
}

/// Returns a scripted model as a served model.
pub(crate) fn served(engine: EngineHandle) -> Served {
    Served {
        name: "fake".into(),
        any_name: false,
        created: 0,
        fingerprint: "fp_0".into(),
        device: "cpu".into(),
        tokenizer: Arc::new(Tokenizer::load(&checkpoint(), 100_000, &[]).unwrap()),
        limits: Limits { vocab_size: 256, max_prompt_tokens: 1000, max_tokens: 100_000, sources: None },
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        template: None,
        grammars: Arc::new(Grammars::new(&rules().vocabulary, &rules().eos, &rules().encode).unwrap()),
        codec: Arc::new(codec()),
        state_bytes: 4,
        memory: ModelMemory::default(),
        prefixes: Arc::new(PrefixIndex::new(0, 0)),
        engine,
    }
}

/// Returns the codec for the scripted model's snapshots.
pub(crate) fn codec() -> Codec {
    let part = |digit: &str| digit.repeat(64);
    let fingerprint = Fingerprint { architecture: part("a"), weights: part("b"), tokenizer: part("c") };
    let layout = StateLayout { layers: 1, heads: 1, head: 1, taps: 0, channels: 0, cross: 0 };
    Codec { fingerprint, layout, vocab_size: 256, greatest: Vec::new(), sources: 0, keys: None }
}

/// Returns `body` with the fields of `more` added or replaced.
#[expect(clippy::needless_pass_by_value, reason = "both are made where it is called")]
pub(crate) fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Sends a request to the application without a socket.
pub(crate) async fn send(state: &AppState, request: Request<Body>) -> Response<Body> {
    app(state.clone()).oneshot(request).await.unwrap()
}

pub(crate) fn get(path: &str) -> Request<Body> {
    Request::get(path).body(Body::empty()).unwrap()
}

/// Builds a completion request with any body.
pub(crate) fn completion(body: impl Into<Body>) -> Request<Body> {
    Request::builder()
        .method(Method::POST)
        .uri("/v1/completions")
        .header(header::CONTENT_TYPE, "application/json")
        .body(body.into())
        .unwrap()
}

pub(crate) async fn text(response: Response<Body>) -> String {
    String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().into()).unwrap()
}

/// Posts a completion request and reads a JSON answer.
pub(crate) async fn post(state: &AppState, body: Value) -> (StatusCode, Value) {
    let response = send(state, completion(body.to_string())).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

/// Returns the data of every event of a stream.
pub(crate) fn events(stream: &str) -> Vec<&str> {
    let lines = stream.lines().filter(|line| !line.is_empty() && !line.starts_with(':'));
    lines.map(|line| line.strip_prefix("data: ").unwrap_or_else(|| panic!("no data line: {line}"))).collect()
}

/// Reads a streamed completion; returns the text and token ids of each choice, and all chunks.
pub(crate) async fn stream(state: &AppState, body: Value) -> (Vec<(String, Vec<u64>)>, Vec<Value>) {
    let response = send(state, completion(body.to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    let stream = text(response).await;
    let mut data = events(&stream);
    assert_eq!(data.pop(), Some("[DONE]"));
    let chunks: Vec<Value> = data.iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    let mut texts = Vec::new();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        texts.resize(texts.len().max(index + 1), (String::new(), Vec::new()));
        texts[index].0.push_str(choice["text"].as_str().unwrap());
        texts[index].1.extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
    }
    (texts, chunks)
}
