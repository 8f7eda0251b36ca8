//! Streams that begin on one server and end on another: each event has the same bytes that the first server sent, or
//! would have sent.

use std::path::Path;
use std::sync::Arc;

use axum::body::{Body, BodyDataStream, to_bytes};
use axum::http::{Request, Response, StatusCode, header};
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::api::state::{ApiOptions, AppState, Served};
use crate::checkpoint::{OpenOptions, open};
use crate::engine::{EngineHandle, EngineOptions, PassCost, PassCosts};
use crate::session::shared::{Cluster, Death, Member};
use crate::text::ChatTemplate;

mod overtaken;
mod parked;

/// Costs that make drafts free, so that every proposed draft is verified.
const FREE: PassCosts = PassCosts { step: PassCost { base: 1.0, each: 0.0 }, chunk: PassCost { base: 1.0, each: 0.0 } };

/// A chat template whose answers begin with reasoning.
const REASONS: &str = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}<think>";

struct Server {
    state: AppState,
    member: Arc<Member>,
    engine: EngineHandle,
}

/// Starts a server of the cluster, with the shipped model.
fn server(cluster: &Arc<Cluster>) -> Server {
    server_of(cluster, 0, |_| ())
}

/// Like [`server`], with drafts or a changed model.
fn server_of(cluster: &Arc<Cluster>, draft_max: usize, change: impl Fn(&mut Served)) -> Server {
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny");
    let engine = EngineOptions { draft_max, pass_costs: Some(FREE), ..EngineOptions::default() };
    let options = OpenOptions { slots: 8, engine, ..OpenOptions::default() };
    let (mut served, _) = open(&checkpoint, &options).unwrap();
    change(&mut served);
    let (member, store) = cluster.join(served.codec.clone());
    let (state, engine) = (AppState::new(ApiOptions::default()), served.engine.clone());
    state.set_store(store);
    state.serve(served);
    Server { state, member, engine }
}

impl Server {
    async fn send(&self, request: Request<Body>) -> Response<Body> {
        crate::app(self.state.clone()).oneshot(request).await.unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> Response<Body> {
        self.send(post(path, body)).await
    }

    async fn session(&self) -> String {
        json_of(self.post("/v1/sessions", &json!({"seed": 5})).await).await["id"].as_str().unwrap().to_owned()
    }

    async fn head(&self, session: &str) -> String {
        let found = self.send(Request::get(format!("/v1/sessions/{session}")).body(Body::empty()).unwrap()).await;
        json_of(found).await["version"].as_str().unwrap().to_owned()
    }

    /// Starts a resumable stream in a new session; returns the session, the stream's id, its version, and the response.
    async fn stream(&self, path: &str, body: &Value) -> (String, String, String, BodyDataStream) {
        let session = self.session().await;
        let response = self.send(request(path, body, &session)).await;
        assert_eq!(response.status(), StatusCode::OK);
        let header = |name: &str| response.headers()[name].to_str().unwrap().to_owned();
        let (id, version) = (header("x-stream-id"), header("x-session-version"));
        (session, id, version, response.into_body().into_data_stream())
    }

    async fn resume(&self, id: &str, last: Option<usize>) -> Response<Body> {
        self.send(get(id, last)).await
    }

    /// Returns the events after number `last`.
    async fn rest(&self, id: &str, last: Option<usize>) -> Vec<String> {
        let response = self.resume(id, last).await;
        assert_eq!(response.status(), StatusCode::OK);
        events(&text(response).await)
    }

    async fn metric(&self, name: &str) -> f64 {
        let all = text(self.send(Request::get("/metrics").body(Body::empty()).unwrap()).await).await;
        let line = all.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("no {name}"));
        line.trim().parse().unwrap()
    }
}

fn post(path: &str, body: &Value) -> Request<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

fn request(path: &str, body: &Value, session: &str) -> Request<Body> {
    let mut body = body.clone();
    body["session"] = session.into();
    body["stream"] = true.into();
    body["on_disconnect"] = "continue".into();
    post(path, &body)
}

fn get(id: &str, last: Option<usize>) -> Request<Body> {
    let request = Request::get(format!("/v1/streams/{id}"));
    let request = if let Some(last) = last { request.header("last-event-id", last) } else { request };
    request.body(Body::empty()).unwrap()
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(to_bytes(response.into_body(), usize::MAX).await.unwrap().into()).unwrap()
}

async fn json_of(response: Response<Body>) -> Value {
    serde_json::from_str(&text(response).await).unwrap()
}

/// Splits a stream into its events, each with its number and its name.
fn events(stream: &str) -> Vec<String> {
    stream.split_terminator("\n\n").map(str::to_owned).collect()
}

/// Returns the events that have arrived by now.
fn arrived(body: &mut BodyDataStream) -> Vec<String> {
    let mut text = String::new();
    while let Some(Some(chunk)) = body.next().now_or_never() {
        text += std::str::from_utf8(&chunk.unwrap()).unwrap();
    }
    events(&text)
}

async fn whole(body: BodyDataStream) -> Vec<String> {
    let chunks: Vec<_> = body.map(Result::unwrap).collect().await;
    events(std::str::from_utf8(&chunks.concat()).unwrap())
}

fn data(event: &str) -> Value {
    serde_json::from_str(event.lines().find_map(|line| line.strip_prefix("data: ")).unwrap()).unwrap_or_default()
}

/// Requests in both formats that have sessions, with all features that shape their events.
fn requests() -> Vec<(&'static str, &'static str, Value)> {
    let usage = json!({"include_usage": true, "continuous_usage_stats": true});
    let schema = json!({"type": "object", "required": ["size"], "additionalProperties": false,
        "properties": {"size": {"enum": ["small", "large"]}}});
    let asks = json!([{"role": "user", "content": "Tell me of a fox."}]);
    let (completions, chat) = ("/v1/completions", "/v1/chat/completions");
    vec![
        ("text", completions, json!({"prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "temperature": 0.9})),
        ("the session's own random numbers", completions, json!({"prompt": "One day", "max_tokens": 16})),
        (
            "ids, log probabilities and usage",
            completions,
            json!({"prompt": "one two three one two three one two", "max_tokens": 24, "temperature": 0, "logprobs": 2,
                "return_token_ids": true, "stream_options": usage}),
        ),
        (
            "stop strings",
            completions,
            json!({"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "stop": [" the ", " a big"]}),
        ),
        (
            "a regular expression",
            completions,
            json!({"prompt": "A number:", "max_tokens": 40, "regex": "(one two three ){4}[0-9]{1,4}"}),
        ),
        ("chat", chat, json!({"messages": asks, "max_tokens": 16, "seed": 3, "logprobs": true, "top_logprobs": 1})),
        (
            "a schema",
            chat,
            json!({"messages": asks, "max_tokens": 64, "response_format":
                {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema}}}),
        ),
        (
            "tools",
            chat,
            json!({"messages": asks, "max_tokens": 64, "tool_choice": "required", "tools":
                [{"type": "function", "function": {"name": "measure", "parameters": schema}}]}),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn drafts_other_rows_and_other_servers_change_no_byte() {
    let cluster = Cluster::new();
    let (first, drafting) = (server(&cluster), server_of(&cluster, 8, |_| ()));
    for (name, path, body) in requests() {
        let (_, id, version, stream) = first.stream(path, &body).await;
        let all = whole(stream).await;
        assert!(all.len() > 3, "{name}: {all:?}");
        assert!(all.iter().any(|event| data(event)["session"]["version"] == version), "{name}: {all:?}");
        assert!(!all.concat().contains("timings"), "{name}");
        // Beside other texts in the same batch.
        let other = post("/v1/completions", &json!({"prompt": "A cat", "max_tokens": 40, "n": 3, "seed": 1}));
        let (again, other) = tokio::join!(drafting.rest(&id, None), drafting.send(other));
        assert_eq!(other.status(), StatusCode::OK);
        assert_eq!(again, all, "{name}");
        for last in [0, all.len() / 2, all.len() - 2, all.len() - 1] {
            assert_eq!(drafting.rest(&id, Some(last)).await, all[last + 1..], "{name}: after {last}");
        }
    }
    assert!(drafting.engine.stats().accepted_drafts > 0, "drafts were kept");
    assert_eq!(first.engine.stats().drafted_tokens, 0);
    assert_eq!(drafting.metric("tidegate_stream_takeovers_total").await, requests().len() as f64);
    assert_eq!(drafting.metric("tidegate_stream_recomputed_tokens_total").await, 0.0, "the clients had no event");
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_is_told_apart_in_the_same_events() {
    let cluster = Cluster::new();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), REASONS).unwrap();
    let template = ChatTemplate::load(folder.path()).unwrap().map(Arc::new);
    let servers = [0, 8].map(|drafts| server_of(&cluster, drafts, |served| served.template.clone_from(&template)));
    let body = json!({"messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 24, "seed": 3});
    let (_, id, _, stream) = servers[0].stream("/v1/chat/completions", &body).await;
    let all = whole(stream).await;
    assert!(all.iter().any(|event| data(event)["choices"][0]["delta"]["reasoning_content"].is_string()), "{all:?}");
    assert_eq!(servers[1].rest(&id, Some(3)).await, all[4..]);
    let recomputed = servers[1].metric("tidegate_stream_recomputed_tokens_total").await;
    assert!((3.0..10.0).contains(&recomputed), "the client had four events, one without a token: {recomputed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_dies_before_its_commit_leaves_the_turn_to_another() {
    for (name, path, body) in requests() {
        for read in [0, 1, usize::MAX] {
            let cluster = Cluster::new();
            let (first, second) = (server(&cluster), server(&cluster));
            // A prompt that only one server has cached changes no event.
            let knows = if read == 0 { &first } else { &second };
            whole(knows.stream(path, &body).await.3).await;
            first.member.dies(Death::BeforeCommit);
            let (session, id, version, mut stream) = first.stream(path, &body).await;
            first.member.died.notified().await;
            let had = arrived(&mut stream);
            assert!(had.len() > 1, "{name}");
            let read = read.min(had.len());
            assert_ne!(second.head(&session).await, version);
            let rest = second.rest(&id, read.checked_sub(1)).await;
            assert_eq!(rest[..had.len() - read], had[read..], "{name}");
            assert!(rest.last().unwrap().ends_with("data: [DONE]"), "{name}: {rest:?}");
            assert_eq!(second.head(&session).await, version, "{name}");
            // Other servers can compute it as well, now that it is committed.
            let third = server(&cluster);
            assert_eq!(third.rest(&id, read.checked_sub(1)).await, rest, "{name}");
            assert_eq!(third.head(&session).await, version);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_is_committed_is_not_committed_again() {
    let cluster = Cluster::new();
    let [first, second, third] = [(); 3].map(|()| server(&cluster));
    first.member.dies(Death::AfterCommit);
    let body = json!({"prompt": "Once", "max_tokens": 12, "seed": 1});
    let (session, id, version, mut stream) = first.stream("/v1/completions", &body).await;
    first.member.died.notified().await;
    let had = arrived(&mut stream);
    assert_eq!(second.head(&session).await, version);
    // Somebody continues the session before the client asks for the last events.
    let next = json!({"prompt": " And", "max_tokens": 4, "session": session});
    assert_eq!(second.post("/v1/completions", &next).await.status(), StatusCode::OK);
    let head = second.head(&session).await;
    let rest = second.rest(&id, Some(had.len() - 1)).await;
    let last = data(&rest[0]);
    assert_eq!((&last["session"]["version"], &last["session"]["id"]), (&json!(version), &json!(session)));
    assert_eq!(rest.last().unwrap(), &format!("id: {}\ndata: [DONE]", had.len() + rest.len() - 1));
    assert_eq!(third.rest(&id, None).await, [had, rest].concat());
    assert_eq!(third.head(&session).await, head);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_moved_on_ends_the_stream_with_a_conflict() {
    let cluster = Cluster::new();
    let [first, second, third] = [(); 3].map(|()| server(&cluster));
    first.member.dies(Death::BeforeCommit);
    let body = json!({"prompt": "Once", "max_tokens": 12, "seed": 1});
    let (session, id, _, mut stream) = first.stream("/v1/completions", &body).await;
    first.member.died.notified().await;
    let had = arrived(&mut stream);
    let next = json!({"prompt": "Another", "max_tokens": 4, "session": session});
    assert_eq!(second.post("/v1/completions", &next).await.status(), StatusCode::OK);
    let head = second.head(&session).await;
    let all = second.rest(&id, None).await;
    assert_eq!(all[..had.len()], had);
    let [error] = &all[had.len()..] else { panic!("one more event: {all:?}") };
    assert_eq!(data(error)["error"]["code"], "session_changed");
    assert_eq!(second.head(&session).await, head);
    assert_eq!(third.resume(&id, None).await.status(), StatusCode::NOT_FOUND, "the stream has failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_server_computes_a_stream_once_and_only_if_its_holder_is_gone() {
    let cluster = Cluster::new();
    let [first, second, third] = [(); 3].map(|()| server(&cluster));
    first.member.dies(Death::BeforeCommit);
    first.member.hangs();
    let body = json!({"prompt": "Once", "max_tokens": 12, "seed": 1});
    let (_, id, _, mut stream) = first.stream("/v1/completions", &body).await;
    first.member.died.notified().await;
    let had = arrived(&mut stream);
    let held = second.resume(&id, None).await;
    assert_eq!(held.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(held.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(json_of(held).await["error"]["code"], "stream_unavailable");
    let mut stranger = get(&id, None);
    stranger.headers_mut().insert(header::AUTHORIZATION, "Bearer stranger".parse().unwrap());
    first.member.kill();
    assert_eq!(second.send(stranger).await.status(), StatusCode::NOT_FOUND);
    third.state.drain();
    assert_eq!(third.resume(&id, None).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    let updated = server_of(&cluster, 0, |served| served.fingerprint = "fp_1".into());
    assert_eq!(updated.resume(&id, None).await.status(), StatusCode::GONE);
    let (all, rest) = tokio::join!(second.rest(&id, None), second.rest(&id, Some(had.len() - 1)));
    assert_eq!((&all[..had.len()], &all[had.len()..]), (&had[..], &rest[..]));
    assert_eq!(second.metric("tidegate_stream_takeovers_total").await, 1.0);
    assert_eq!(second.engine.stats().admitted, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_shuts_down_gives_its_streams_up() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let body = json!({"prompt": "Once", "max_tokens": 100_000, "min_tokens": 100_000, "seed": 1});
    let (session, id, _, mut stream) = first.stream("/v1/completions", &body).await;
    let before = first.head(&session).await;
    let begun = stream.next().await.unwrap().unwrap();
    first.state.drain();
    let had = [events(std::str::from_utf8(&begun).unwrap()), whole(stream).await].concat();
    first.state.settle().await;
    assert_eq!(second.head(&session).await, before);
    assert!(had.iter().all(|event| data(event)["error"].is_null()), "{:?}", had.last());
    let mut again = second.resume(&id, None).await.into_body().into_data_stream();
    let mut text = String::new();
    while text.matches("\n\n").count() <= had.len() {
        text += std::str::from_utf8(&again.next().await.unwrap().unwrap()).unwrap();
    }
    assert_eq!(events(&text)[..had.len()], had);
    // It is now ended early, which no other server can repeat.
    let end = || Request::delete(format!("/v1/streams/{id}")).body(Body::empty()).unwrap();
    assert_eq!(second.send(end()).await.status(), StatusCode::NO_CONTENT);
    assert_eq!(cluster.streams(), 0);
    assert!(whole(again).await.last().unwrap().ends_with("data: [DONE]"));
    assert_ne!(second.head(&session).await, before);
    assert_eq!(second.send(end()).await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_begins_only_once_it_is_recorded() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let session = first.session().await;
    let body = json!({"prompt": "Once", "max_tokens": 4});
    first.member.refuses_streams();
    let refused = first.send(request("/v1/completions", &body, &session)).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(first.engine.stats().admitted, 0);
    // A stream of several texts is not recorded, and says how long they took.
    let several = json!({"prompt": "Once", "max_tokens": 4, "n": 2, "keep": "best"});
    let (_, id, _, stream) = first.stream("/v1/completions", &several).await;
    assert!(whole(stream).await.concat().contains("timings"));
    assert_eq!(second.resume(&id, None).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(cluster.streams(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_gets_the_result_of_the_server_that_took_over() {
    let cluster = Cluster::new();
    let [first, second] = [(); 2].map(|()| server(&cluster));
    let session = first.session().await;
    let keyed = || {
        let mut request = request("/v1/completions", &json!({"prompt": "Once", "max_tokens": 6}), &session);
        request.headers_mut().insert("idempotency-key", "one".parse().unwrap());
        request
    };
    first.member.dies(Death::BeforeCommit);
    let response = first.send(keyed()).await;
    let (id, version) = (response.headers()["x-stream-id"].clone(), response.headers()["x-session-version"].clone());
    first.member.died.notified().await;
    let all = second.rest(id.to_str().unwrap(), None).await;
    let retried = second.send(keyed()).await;
    assert_eq!(retried.headers()["x-session-version"], version);
    let first_id = data(&all[0])["id"].clone();
    assert_eq!(data(&events(&text(retried).await)[0])["id"], first_id);
    assert_eq!(second.engine.stats().admitted, 1);
}
