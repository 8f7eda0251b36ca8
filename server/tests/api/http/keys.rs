//! API keys: every route requires one, each opens what its scopes permit, and nothing reveals a key.

use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};

use crate::common::fake::Fake;
use crate::common::{scripted, send, text};
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::api::{Access, Keys, Scope, paths};
use tidegate_server::engine::EngineThread;
use tidegate_server::{ApiOptions, AppState};

const ALL: &str = "sk-everything-0123456789";
const DEFAULT: &str = "sk-default-0123456789";
const METRICS: &str = "sk-metrics-0123456789";
const MAKES: &str = "sk-generate-0123456789";

fn keys(file: &Value) -> Keys {
    let mut written = tempfile::NamedTempFile::new().unwrap();
    written.write_all(file.to_string().as_bytes()).unwrap();
    Keys::load(Some(written.path()), &[]).unwrap().unwrap()
}

fn locked() -> (AppState, EngineThread) {
    Log::get();
    let (state, _, thread) = scripted(Fake::new(4), 16);
    state.set_api_keys(keys(&json!({"keys": [
        {"name": "all", "key": ALL, "scopes": ["generate", "sessions", "metrics"]},
        {"name": "default", "key": DEFAULT},
        {"name": "metrics", "key": METRICS, "scopes": ["metrics"]},
        {"name": "makes", "key": MAKES, "scopes": ["generate"]},
    ]})));
    (state, thread)
}

/// Returns a path that the router matches to this route.
fn example(route: &str) -> String {
    let part = |part: &str| if part.starts_with('{') { "x".to_owned() } else { part.to_owned() };
    route.split('/').map(part).collect::<Vec<_>>().join("/")
}

fn request(method: &Method, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let request = Request::builder().method(method).uri(path);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(Body::empty()).unwrap()
}

fn bearer(key: &str) -> String {
    format!("Bearer {key}")
}

const METHODS: [Method; 7] =
    [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD, Method::OPTIONS];

async fn refused(response: Response<Body>, status: StatusCode, code: &str, what: &str) -> HeaderMap {
    assert_eq!(response.status(), status, "{what}");
    let headers = response.headers().clone();
    let challenge = headers[header::WWW_AUTHENTICATE].to_str().unwrap();
    assert!(challenge.starts_with("Bearer"), "{what}: {challenge}");
    assert!(headers.contains_key("x-request-id"), "{what}");
    let body: Value = serde_json::from_str(&text(response).await).unwrap();
    // Routes for clients of other servers use those servers' error format.
    if !what.contains("/v1/") || what.contains("/v1/messages") {
        assert!(body.to_string().contains("API key"), "{what}: {body}");
        return headers;
    }
    assert_eq!(body["error"]["code"], code, "{what}: {body}");
    assert!(body["error"]["message"].is_string() && body["error"]["type"] == "invalid_request_error");
    headers
}

#[tokio::test]
async fn every_route_wants_a_key() {
    let (state, _thread) = locked();
    for (path, _) in paths().iter().filter(|(_, access)| *access == Access::Public) {
        let known = ["/", "/favicon.ico", "/livez", "/health", "/ready", "/playground/{file}", "/openapi.json"];
        assert!(known.contains(&path.as_str()) || path.starts_with("/docs"), "{path} is open: is it to be?");
        let response = send(&state, request(&Method::GET, &example(path), &[])).await;
        assert_ne!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
        for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            let response = send(&state, request(&method, &example(path), &[])).await;
            refused(response, StatusCode::UNAUTHORIZED, "invalid_api_key", &format!("{method} {path}")).await;
        }
    }
    let nowhere =
        ["/v2", "/v1/", "/v1/completions/", "/playground", "//v1/models", "/V1/models", "/docsx", "/metricsx"];
    let closed = paths().into_iter().filter(|(_, access)| *access != Access::Public).map(|(path, _)| example(&path));
    let closed: Vec<String> = closed.chain(nowhere.map(str::to_owned)).collect();
    assert!(closed.len() > 20 && closed.contains(&"/v1/sessions/x/fork".to_owned()), "{closed:?}");
    for path in closed {
        for method in &METHODS {
            let what = format!("{method} {path}");
            // A response to HEAD has no body, so there is no error code to check.
            if method == Method::HEAD {
                let response = send(&state, request(method, &path, &[])).await;
                assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{what}");
                continue;
            }
            let (unknown, other) = (bearer("sk-unknown-0123456789"), format!("Basic {ALL}"));
            for headers in [
                &[][..],
                &[("authorization", unknown.as_str())],
                &[("authorization", other.as_str())],
                &[("authorization", "Bearer")],
                &[("authorization", "Bearer ")],
                &[("x-api-key", "sk-unknown-0123456789")],
                &[("x-api-key", "")],
                // `Authorization` takes precedence.
                &[("authorization", unknown.as_str()), ("x-api-key", ALL)],
                &[("cookie", ALL)],
            ] {
                let response = send(&state, request(method, &path, headers)).await;
                refused(response, StatusCode::UNAUTHORIZED, "invalid_api_key", &what).await;
            }
        }
    }
}

#[tokio::test]
async fn a_key_opens_what_its_scopes_say() {
    let (state, _thread) = locked();
    let opens = |key: &str, needed: Scope| match key {
        ALL => true,
        DEFAULT => needed != Scope::Metrics,
        METRICS => needed == Scope::Metrics,
        _ => needed == Scope::Generate,
    };
    let mut seen = Vec::new();
    for (path, access) in paths() {
        let Access::Scope(needed) = access else { continue };
        seen.push(needed);
        for key in [ALL, DEFAULT, METRICS, MAKES] {
            let path = example(&path);
            for (name, value) in [("authorization", bearer(key)), ("x-api-key", key.to_owned())] {
                // No route has this method, so the router refuses a request that passes auth.
                let response = send(&state, request(&Method::TRACE, &path, &[(name, &value)])).await;
                if opens(key, needed) {
                    assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED, "{path}");
                    continue;
                }
                let headers = refused(response, StatusCode::FORBIDDEN, "insufficient_scope", &path).await;
                let challenge = headers[header::WWW_AUTHENTICATE].to_str().unwrap();
                assert!(challenge.contains(&format!("scope=\"{needed}\"")), "{challenge}");
            }
        }
    }
    assert!(seen.contains(&Scope::Generate) && seen.contains(&Scope::Sessions));
    let nowhere = send(&state, request(&Method::GET, "/nowhere", &[("x-api-key", METRICS)])).await;
    assert_eq!(nowhere.status(), StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn scopes_are_where_they_belong() {
    let find = |path: &str| paths().into_iter().find(|(route, _)| route == path).unwrap().1;
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/{*id}"] {
        assert_eq!(find(path), Access::Scope(Scope::Generate), "{path}");
    }
    for path in
        ["/v1/sessions", "/v1/sessions/{id}/snapshot", "/v1/snapshots", "/v1/streams/{id}", "/v1/responses/{id}"]
    {
        assert_eq!(find(path), Access::Scope(Scope::Sessions), "{path}");
    }
    assert_eq!(find("/metrics"), Access::Scope(Scope::Metrics));
}

/// Creates a session with `key`, and returns whether `other` finds it.
async fn shares(state: &AppState, key: &str, other: &str) -> bool {
    let make = |key: &str| {
        let request = request(
            &Method::POST,
            "/v1/sessions",
            &[("authorization", &bearer(key)), ("content-type", "application/json")],
        );
        request.map(|_| Body::from("{}"))
    };
    let made = send(state, make(key)).await;
    assert_eq!(made.status(), StatusCode::CREATED);
    let made: Value = serde_json::from_str(&text(made).await).unwrap();
    let path = format!("/v1/sessions/{}", made["id"].as_str().unwrap());
    let found = send(state, request(&Method::GET, &path, &[("x-api-key", other)])).await.status();
    assert!(found == StatusCode::OK || found == StatusCode::NOT_FOUND, "{found}");
    found == StatusCode::OK
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_belongs_to_the_name_of_the_key() {
    let state = crate::common::sessions::app().await.state;
    // Without API keys, whoever sends the same token owns the session, whichever header it comes in.
    assert!(shares(&state, ALL, ALL).await);
    assert!(!shares(&state, ALL, DEFAULT).await);
    let both =
        |first: &str, second: &str| keys(&json!({"keys": [{"name": "a", "key": first}, {"name": "b", "key": second}]}));
    state.set_api_keys(both(ALL, DEFAULT));
    assert!(shares(&state, ALL, ALL).await);
    assert!(!shares(&state, ALL, DEFAULT).await);
    // The key with the name `a` is replaced; its sessions stay with the name.
    let list = |key: &'static str| {
        let state = state.clone();
        async move {
            let listed = send(&state, request(&Method::GET, "/v1/sessions", &[("x-api-key", key)])).await;
            let listed: Value = serde_json::from_str(&text(listed).await).unwrap();
            listed["data"].as_array().unwrap().len()
        }
    };
    assert_eq!((list(ALL).await, list(DEFAULT).await), (2, 0));
    state.set_api_keys(both(MAKES, DEFAULT));
    assert_eq!((list(MAKES).await, list(DEFAULT).await), (2, 0));
    let old = send(&state, request(&Method::GET, "/v1/sessions", &[("x-api-key", ALL)])).await;
    refused(old, StatusCode::UNAUTHORIZED, "invalid_api_key", "a key that was taken away").await;
}

/// The log of all tests in this file. They share one, because a process decides only once whether a call site logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn get() -> Self {
        static LOG: LazyLock<Log> = LazyLock::new(|| {
            let log = Log::default();
            let writer = log.clone();
            let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_ansi(false);
            subscriber.with_writer(move || writer.clone()).init();
            log
        });
        LOG.clone()
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn what_is_kept_takes_its_scope_on_every_route() {
    let (state, _thread) = locked();
    for (path, param, body) in [
        ("/v1/completions", "session", json!({"prompt": [1], "session": "ses_0"})),
        ("/v1/responses", "previous_response_id", json!({"input": "x", "previous_response_id": "resp_0"})),
        ("/v1/responses", "store", json!({"input": "x", "store": true})),
        ("/v1/completions", "idempotency-key", json!({"prompt": [1], "max_tokens": 2})),
        ("/v1/responses", "idempotency-key", json!({"input": "x", "store": false})),
    ] {
        for key in [MAKES, DEFAULT] {
            let bearer = bearer(key);
            let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
            let mut asked = request(&Method::POST, path, &headers).map(|_| Body::from(body.to_string()));
            if param == "idempotency-key" {
                asked.headers_mut().insert(param, "once".parse().unwrap());
            }
            let answer = send(&state, asked).await;
            assert_eq!(answer.status() == StatusCode::FORBIDDEN, key == MAKES, "{path} {param}");
            if key == MAKES {
                let error: Value = serde_json::from_str(&text(answer).await).unwrap();
                assert_eq!(error["error"]["param"], param);
                assert_eq!(error["error"]["code"], "insufficient_scope");
            }
        }
    }
}

#[tokio::test]
async fn the_log_names_the_key_and_says_nothing_of_it() {
    let log = Log::get();
    let (state, _thread) = locked();
    for key in [DEFAULT, "sk-mistyped-0123456789"] {
        for (name, value) in [("authorization", bearer(key)), ("x-api-key", key.to_owned())] {
            let headers = [(name, value.as_str()), ("content-type", "application/json")];
            let completion = request(&Method::POST, "/v1/completions", &headers);
            let answer = send(&state, completion.map(|_| Body::from(r#"{"prompt": [1], "max_tokens": 2}"#))).await;
            assert_eq!(answer.status().is_success(), key == DEFAULT);
            let forbidden = send(&state, request(&Method::GET, "/v1/sessions/x", &[(name, &value)])).await;
            assert!(!text(forbidden).await.contains("0123456789"));
        }
    }
    let log = log.text();
    assert!(log.contains(r#"key="default""#) && log.contains("unknown API key"), "{log}");
    assert!(!log.contains("0123456789") && !log.contains("sk-"), "{log}");
}

#[tokio::test]
async fn without_keys_all_requests_are_allowed() {
    let (state, ..) = scripted(Fake::new(4), 16);
    assert_eq!(send(&state, request(&Method::GET, "/v1/models", &[])).await.status(), StatusCode::OK);
    let unknown = request(&Method::GET, "/v1/models", &[("authorization", "Bearer whatever")]);
    assert_eq!(send(&state, unknown).await.status(), StatusCode::OK);
    let before = AppState::new(ApiOptions::default());
    before.set_api_keys(keys(&json!({"keys": [{"name": "a", "key": ALL}]})));
    let early = send(&before, request(&Method::GET, "/v1/models", &[])).await;
    assert_eq!(early.status(), StatusCode::UNAUTHORIZED, "also while the model is being loaded");
}
