//! An application with sessions, and requests to it.

use std::path::Path;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::engine::{EngineHandle, Stats};
use tidegate_server::session::{Location, Store, StoreOptions};
use tidegate_server::{ApiOptions, AppState, Served};

use super::{checkpoint, send};

/// An application of one test.
pub(crate) struct App {
    pub(crate) state: AppState,
    engine: EngineHandle,
    pub(crate) store: Store,
}

/// Starts an application with the shipped checkpoint and sessions in memory.
pub(crate) async fn app() -> App {
    made(None).await
}

/// Like [`app`], with options.
pub(crate) async fn app_from(options: OpenOptions) -> App {
    app_on(&checkpoint(), options, Location::Memory).await
}

/// Starts an application with a checkpoint and sessions at this location.
pub(crate) async fn app_on(checkpoint: &Path, options: OpenOptions, location: Location) -> App {
    app_of(open(checkpoint, &options).unwrap().0, location).await
}

/// Starts an application whose store commits only what requests change, because its first sweep is an hour away.
pub(crate) async fn quiet() -> App {
    let served = open(&checkpoint(), &OpenOptions { slots: 8, ..OpenOptions::default() }).unwrap().0;
    let sweep_every = Duration::from_hours(1);
    app_storing(served, StoreOptions { sweep_every, ..StoreOptions::new(Location::Memory) }).await
}

/// Starts an application with an open model and sessions at this location.
pub(crate) async fn app_of(served: Served, location: Location) -> App {
    app_storing(served, StoreOptions::new(location)).await
}

/// Like [`app_of`], with store options.
pub(crate) async fn app_storing(served: Served, options: StoreOptions) -> App {
    let store = Store::open(options, served.codec.clone()).await.unwrap();
    let (state, engine) = (AppState::new(ApiOptions::default()), served.engine.clone());
    state.set_store(store.clone());
    state.serve(served);
    App { state, engine, store }
}

/// Like [`app`], with a secret that signs snapshots.
pub(crate) async fn app_with(secret: &[u8]) -> App {
    made(Some(secret.to_vec())).await
}

async fn made(secret: Option<Vec<u8>>) -> App {
    app_from(OpenOptions { secret, slots: 8, ..OpenOptions::default() }).await
}

/// A complete answer.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> String {
        self.headers.get(name).map_or_else(String::new, |value| value.to_str().unwrap().to_owned())
    }

    pub(crate) fn param(&self) -> String {
        self.json()["error"]["param"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }

    /// Returns the whole text of a streamed answer, and its session.
    pub(crate) fn texts(&self) -> (String, Value) {
        let text = self.text();
        let chunks = super::events(&text).into_iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
        chunks.fold((String::new(), Value::Null), |(text, session), chunk| {
            let more = chunk["choices"][0]["text"].as_str().unwrap_or_default();
            let session = if chunk["session"].is_null() { session } else { chunk["session"].clone() };
            (text + more, session)
        })
    }
}

/// A stream being read. Dropping it disconnects the client.
pub(crate) struct Open {
    headers: HeaderMap,
    body: axum::body::BodyDataStream,
}

impl Open {
    pub(crate) fn header(&self, name: &str) -> String {
        self.headers[name].to_str().unwrap().to_owned()
    }

    /// Returns the next chunk, or `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<String> {
        Some(String::from_utf8_lossy(&self.body.next().await?.unwrap()).into_owned())
    }

    /// Returns the next chunk, which must exist.
    pub(crate) async fn read_some(&mut self) -> String {
        self.next().await.expect("the stream has ended")
    }
}

impl App {
    pub(crate) async fn raw(&self, method: Method, path: &str, body: Body, headers: &[(&str, &str)]) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = send(&self.state, request.body(body).unwrap()).await;
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.unwrap();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn send(&self, method: Method, path: &str, body: Value, headers: &[(&str, &str)]) -> Answer {
        let json = [&[("content-type", "application/json")], headers].concat();
        let body = if body.is_null() { Body::empty() } else { Body::from(body.to_string()) };
        self.raw(method, path, body, &json).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, Value::Null, &[]).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.send(Method::POST, path, body, &[]).await
    }

    pub(crate) async fn upload(&self, bytes: Bytes) -> Answer {
        let octets = [("content-type", "application/octet-stream")];
        self.raw(Method::POST, "/v1/snapshots", Body::from(bytes), &octets).await
    }

    /// Starts a stream without reading it.
    pub(crate) async fn open(&self, path: &str, body: Value, headers: &[(&str, &str)]) -> Open {
        let mut request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = send(&self.state, request.body(Body::from(body.to_string())).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        let (parts, body) = response.into_parts();
        Open { headers: parts.headers, body: body.into_data_stream() }
    }

    /// Waits until the session at `path` is not in use, and returns it.
    pub(crate) async fn until_free(&self, path: &str) -> Value {
        self.until_free_for(path, &[]).await
    }

    /// Like [`Self::until_free`], with request headers.
    pub(crate) async fn until_free_for(&self, path: &str, headers: &[(&str, &str)]) -> Value {
        for _ in 0..2000 {
            let session = self.send(Method::GET, path, Value::Null, headers).await.json();
            if session["in_use"] == false {
                return session;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{path} is still in use");
    }

    pub(crate) fn engine_stats(&self) -> Stats {
        self.engine.stats()
    }
}

/// Returns the header and body of a downloaded file. They hold everything that a continuation depends on, but not the
/// server's ids and times.
pub(crate) fn state_of(file: &[u8]) -> Bytes {
    let length =
        |at: usize, bytes: usize| file[at..at + bytes].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    Bytes::copy_from_slice(&file[40..40 + length(12, 4) + length(16, 8)])
}

/// Builds a greedy request for 8 tokens with their ids, plus the fields of `more`.
pub(crate) fn prompt(text: &str, more: Value) -> Value {
    super::with(json!({"prompt": text, "max_tokens": 8, "temperature": 0, "return_token_ids": true}), more)
}

/// Sends a request that must succeed, and returns its answer.
pub(crate) async fn ok(app: &App, path: &str, body: Value) -> Value {
    let answer = app.post(path, body).await;
    assert!(answer.status.is_success(), "{path}: {}", answer.text());
    answer.json()
}

/// Returns the token ids of an answer's first choice.
pub(crate) fn ids(answer: &Value) -> Vec<u64> {
    answer["choices"][0]["token_ids"].as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

/// Creates a session.
pub(crate) async fn session(app: &App, body: Value) -> Value {
    let answer = app.post("/v1/sessions", body).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    answer.json()
}
