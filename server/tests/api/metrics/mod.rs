//! `/metrics`: the formats are valid, and every request is counted once and correctly.

mod dashboard;
mod scrape;
mod waits;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::common::fake::{Fake, POISON};
use crate::common::{checkpoint, completion, get, post, send, stream, text, with};
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use futures_util::StreamExt;
use scrape::Scrape;
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::{Location, Store, StoreOptions};
use tidegate_server::{ApiOptions, AppState};

const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

async fn scraped(state: &AppState) -> Scrape {
    scrape::read(&text(send(state, get("/metrics")).await).await, false)
}

/// Scrapes until `done` holds: a count may change shortly after the response.
async fn until(state: &AppState, done: impl Fn(&Scrape) -> bool) -> Scrape {
    for _ in 0..2000 {
        let scrape = scraped(state).await;
        if done(&scrape) {
            return scrape;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("timed out waiting for a metric");
}

fn settled(scrape: &Scrape) -> bool {
    scrape.get("num_requests_running") + scrape.get("num_requests_waiting") == 0.0
}

/// Removes the counts that tests do not compare: those of the scrapes themselves, of the store's background work, and
/// of step timing.
fn seen(mut since: BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let others = [
        "decode_batch_size",
        "engine_steps",
        "index_seconds",
        "object_store_seconds",
        "request_queue_steps",
        "requests_admitted",
    ];
    since.retain(|name, _| !name.contains("route=/metrics") && !others.iter().any(|other| name.starts_with(other)));
    since
}

fn expected(pairs: &[(&str, f64)]) -> BTreeMap<String, f64> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
}

fn answers(status: u16) -> String {
    format!("http_requests_total{{route=/v1/completions,method=POST,status={status}}}")
}

fn counting(max_tokens: usize, more: Value) -> Value {
    with(json!({"prompt": [10, 11, 12], "max_tokens": max_tokens}), more)
}

#[tokio::test]
async fn both_formats_are_valid() {
    let state = with_store(1 << 30).await;
    post(&state, json!({"prompt": "The sea", "max_tokens": 3})).await;
    // A metric without a value has no line, so this refused request gives the refusal metrics one.
    post(&state, json!({"prompt": "The sea", "max_tokens": 0})).await;
    let mut read = Vec::new();
    for (accept, kind, open) in [
        ("*/*", CLASSIC, false),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5", OPEN_METRICS, true),
    ] {
        let request = Request::get("/metrics").header(header::ACCEPT, accept).body(Body::empty()).unwrap();
        let response = send(&state, request).await;
        assert_eq!(
            (response.status(), response.headers()[header::CONTENT_TYPE].to_str().unwrap()),
            (StatusCode::OK, kind)
        );
        read.push(scrape::read(&text(response).await, open));
    }
    let [classic, open] = &read[..] else { unreachable!() };
    // The second scrape also counts the request of the first.
    let names = |scrape: &Scrape| {
        scrape.samples.keys().filter(|name| !name.contains("route=/metrics")).cloned().collect::<Vec<_>>()
    };
    assert_eq!(names(classic), names(open));
    for name in
        ["process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds", "process_cpu_seconds_total"]
    {
        assert!(classic.samples[name] > 0.0, "{name}");
    }
    dashboard::check(classic);
    let info = |name: &str| classic.samples.keys().find(|key| key.starts_with(name)).unwrap().clone();
    assert_eq!(info("tidegate_build_info"), format!("tidegate_build_info{{version={}}}", env!("CARGO_PKG_VERSION")));
    let model = info("tidegate_model_info");
    assert!(model.starts_with("tidegate_model_info{model=tidegate-tiny,fingerprint=fp_"), "{model}");
    assert!(model.contains(",device=cpu}") || cfg!(feature = "cuda"), "{model}");
    assert_eq!((classic.get("slots"), classic.get("ready")), (2.0, 1.0));
    assert_eq!(classic.get("disk_budget_bytes"), 64.0 * f64::from(1 << 30));
    let state_bytes = classic.get("state_bytes{tier=slots}");
    assert!(state_bytes > 2.0 * 6.0 * 4.0 * 128.0 * 65.0 * 4.0 && state_bytes < 3e6, "{state_bytes}");
}

#[tokio::test]
async fn a_server_without_a_model_has_metrics() {
    let state = AppState::new(ApiOptions::default());
    let scrape = scraped(&state).await;
    assert!(!scrape.families.contains_key("tidegate_slots"));
    assert_eq!(scrape.get("ready"), 0.0);
    assert_eq!(scrape.samples["tidegate_request_success_total{finished_reason=stop}"], 0.0);
}

#[tokio::test]
async fn finished_texts_are_counted_once_with_all_their_tokens() {
    let (state, ..) = crate::common::scripted(Fake::new(4), 8);
    let before = scraped(&state).await;
    let (status, _) = post(&state, counting(5, json!({}))).await;
    assert_eq!(status, StatusCode::OK);
    stream(&state, counting(4, json!({"stream": true}))).await;
    // Token 253 is followed by 254 and the end-of-text token. Both prompts run at once.
    post(&state, json!({"prompt": [[1, 253], [7]], "max_tokens": 2})).await;
    let after = until(&state, |scrape| settled(scrape) && scrape.get("e2e_request_latency_seconds_count") == 4.0).await;
    let ok = answers(200);
    let want = [
        (ok.as_str(), 3.0),
        ("request_success_total{finished_reason=length}", 3.0),
        ("request_success_total{finished_reason=stop}", 1.0),
        ("prompt_tokens_total", 9.0),
        ("prompt_tokens_computed_total", 9.0),
        ("generation_tokens_total", 13.0),
        ("time_to_first_token_seconds_count", 4.0),
        ("inter_token_latency_seconds_count", 9.0),
        ("e2e_request_latency_seconds_count", 4.0),
        ("request_queue_time_seconds_count", 4.0),
        ("request_prefill_time_seconds_count", 4.0),
        ("request_decode_time_seconds_count", 4.0),
    ];
    assert_eq!(seen(after.since(&before)), expected(&want));
    let rows = after.get("decode_batch_size_sum") - before.get("decode_batch_size_sum");
    assert_eq!(rows, 13.0);
    let chat = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    let chat = chat.body(Body::from(json!({"messages": []}).to_string())).unwrap();
    let status = send(&state, chat).await.status().as_u16();
    let last = scraped(&state).await;
    assert_eq!(
        last.get(&format!("http_requests_total{{route=/v1/chat/completions,method=POST,status={status}}}")),
        1.0
    );
}

#[tokio::test]
async fn times_match_those_that_the_client_observes() {
    let (state, ..) = crate::common::scripted(Fake::new(1).step(Duration::from_millis(20)), 8);
    let before = scraped(&state).await;
    stream(&state, counting(6, json!({"stream": true}))).await;
    let after = until(&state, |scrape| scrape.get("e2e_request_latency_seconds_count") == 1.0).await;
    let sum = |name: &str| after.get(&format!("{name}_seconds_sum")) - before.get(&format!("{name}_seconds_sum"));
    let (first, between, whole) = (sum("time_to_first_token"), sum("inter_token_latency"), sum("e2e_request_latency"));
    // Six steps of at least 20 ms. The last token cannot arrive before its step.
    assert!(first >= 0.02 && between > 0.0, "{first} {between}");
    assert!(first + between >= 0.12 - 1e-6 && whole >= first + between - 1e-6, "{first} {between} {whole}");
}

#[tokio::test]
async fn refused_requests_are_counted_by_error_code() {
    let (state, ..) = crate::common::scripted(Fake::new(1).step(Duration::from_millis(5)), 1);
    let before = scraped(&state).await;
    let bad = post(&state, json!({"prompt": [1], "max_tokens": 0})).await.0;
    let unknown = post(&state, json!({"prompt": [1], "model": "other"})).await.0;
    let long = json!({"prompt": [5], "max_tokens": 1000, "ignore_eos": true, "stream": true});
    let running = send(&state, completion(long.to_string())).await;
    until(&state, |scrape| scrape.get("num_requests_running") == 1.0).await;
    let waiting = send(&state, completion(long.to_string())).await;
    let full = post(&state, counting(1, json!({}))).await.0;
    let during = scraped(&state).await;
    assert_eq!(
        (during.get("slots_used"), during.get("num_requests_waiting"), during.get("queue_capacity")),
        (1.0, 1.0, 1.0)
    );
    assert_eq!((bad.as_u16(), unknown.as_u16(), full.as_u16()), (400, 404, 429));
    drop((running, waiting));
    let after =
        until(&state, |scrape| settled(scrape) && scrape.get("request_cancelled_total{cause=disconnected}") == 2.0)
            .await;
    let since = seen(after.since(&before));
    let [ok, bad, unknown, full] = [200, 400, 404, 429].map(answers);
    let want = [
        (ok.as_str(), 2.0),
        (bad.as_str(), 1.0),
        (unknown.as_str(), 1.0),
        (full.as_str(), 1.0),
        ("requests_refused_total{status=400,code=invalid_request_error}", 1.0),
        ("requests_refused_total{status=404,code=model_not_found}", 1.0),
        ("requests_refused_total{status=429,code=queue_full}", 1.0),
        ("request_cancelled_total{cause=disconnected}", 2.0),
        ("prompt_tokens_total", 2.0),
    ];
    for (name, value) in want {
        assert_eq!(since.get(name), Some(&value), "{name}: {since:?}");
    }
    assert!(
        !since.keys().any(|name| name.starts_with("request_success") || name.starts_with("request_failure")),
        "{since:?}"
    );
    assert!(!since.contains_key("e2e_request_latency_seconds_count"), "{since:?}");
}

#[tokio::test]
async fn failed_texts_do_not_count_as_successes() {
    let (state, ..) = crate::common::scripted(Fake::new(2), 8);
    let before = scraped(&state).await;
    let (status, _) = post(&state, json!({"prompt": [[POISON, 1], [7]], "max_tokens": 50, "ignore_eos": true})).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let after = until(&state, settled).await;
    let since = seen(after.since(&before));
    assert_eq!(since["requests_refused_total{status=500,code=generation_failed}"], 1.0);
    // The request's other text fails with it, or has finished just before.
    let ended = |name: &str| since.get(name).copied().unwrap_or(0.0);
    let (failed, finished) =
        ("request_failure_total{code=generation_failed}", "request_success_total{finished_reason=length}");
    assert_eq!(ended(failed) + ended(finished), 2.0, "{since:?}");
    assert!(ended(failed) >= 1.0, "{since:?}");
}

#[tokio::test]
async fn stalled_clients_are_distinguished_from_disconnected_ones() {
    // The API notices after three quarters of this limit; it is long so that the engine is not first on a busy machine.
    let engine = tidegate_server::engine::EngineOptions { stall_limit: Duration::from_secs(4), ..Default::default() };
    let (handle, _thread) = tidegate_server::engine::spawn(Fake::new(1), crate::common::fake::rules(), engine).unwrap();
    let state = AppState::new(ApiOptions::default());
    state.serve(crate::common::served(handle));
    let body = json!({"prompt": [5], "max_tokens": 50_000, "ignore_eos": true, "stream": true});
    let unread = send(&state, completion(body.to_string())).await;
    let after = until(&state, |scrape| scrape.get("request_cancelled_total{cause=stalled}") == 1.0).await;
    assert_eq!(after.get("request_cancelled_total{cause=disconnected}"), 0.0);
    drop(unread);
    let response = send(&state, completion(body.to_string())).await;
    let mut body = response.into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    drop(body);
    until(&state, |scrape| scrape.get("request_cancelled_total{cause=disconnected}") == 1.0).await;
}

/// Returns a server of the shipped checkpoint with a session store that caches `ram_bytes` in memory.
async fn with_store(ram_bytes: u64) -> AppState {
    let options = OpenOptions { slots: 2, ..OpenOptions::default() };
    let (served, _thread) = open(&checkpoint(), &options).unwrap();
    let options = StoreOptions { ram_bytes, ..StoreOptions::new(Location::Memory) };
    let store = Store::open(options, served.codec.clone()).await.unwrap();
    let state = AppState::new(ApiOptions::default());
    state.set_store(store);
    state.serve(served);
    state
}

#[tokio::test]
async fn turns_are_counted_by_the_tier_of_their_state() {
    for (ram_bytes, tier) in [(1 << 30, "memory"), (1, "disk")] {
        let state = with_store(ram_bytes).await;
        let made = Request::post("/v1/sessions").header(header::CONTENT_TYPE, "application/json");
        let made = send(&state, made.body(Body::from("{}")).unwrap()).await;
        let session: Value = serde_json::from_str(&text(made).await).unwrap();
        let before = scraped(&state).await;
        let turn = |text: &str| json!({"prompt": text, "max_tokens": 3, "session": session["id"], "ignore_eos": true});
        let first = post(&state, turn("The sea")).await.1;
        let middle = scraped(&state).await;
        assert_eq!(middle.since(&before)["session_turns_total{tier=new}"], 1.0);
        let second = post(&state, turn(" and the wind")).await.1;
        assert_eq!((&first["session"]["restored"], &second["session"]["tier"]), (&json!(false), &json!(tier)));
        let after = scraped(&state).await;
        let since = after.since(&middle);
        assert_eq!(since[&format!("session_turns_total{{tier={tier}}}")], 1.0, "{since:?}");
        assert_eq!(since[&format!("snapshot_loads_total{{tier={tier}}}")], 1.0, "{since:?}");
        let recomputed = second["session"]["recomputed_tokens"].as_f64().unwrap();
        assert_eq!(after.get("session_recomputed_tokens_total"), recomputed);
        assert_eq!((since["session_commits_total"], after.get("sessions")), (1.0, 1.0));
        assert_eq!(since["index_seconds_count{operation=commit}"], 1.0);
        assert_eq!(since["object_store_seconds_count{operation=put}"], 1.0);
        let bytes = second["session"]["state_bytes"].as_f64().unwrap();
        let held = |tier: &str| after.get(&format!("state_bytes{{tier={tier}}}"));
        assert!(held("disk") >= bytes, "{}", held("disk"));
        assert_eq!(held("memory") >= bytes, tier == "memory", "{}", held("memory"));
        assert_eq!(held("slots"), 2.0 * bytes);
    }
}

#[tokio::test]
async fn a_request_in_a_slot_restores_its_state_only_if_the_prompt_begins_with_its_text() {
    let state = with_store(1 << 30).await;
    let ask = async |prompt: &str| {
        let body = json!({"prompt": prompt, "n_predict": 0, "id_slot": 1});
        let request = Request::post("/completion").header(header::CONTENT_TYPE, "application/json");
        let response = send(&state, request.body(Body::from(body.to_string())).unwrap()).await;
        assert_eq!(response.status(), StatusCode::OK);
        text(response).await
    };
    let mut before = scraped(&state).await;
    for (prompt, tier) in [("The sea", "new"), ("The sea and the wind", "memory"), ("In the morning", "new")] {
        ask(prompt).await;
        let after = until(&state, settled).await;
        let since = after.since(&before);
        let counted: Vec<&String> = since.keys().filter(|name| name.starts_with("session_turns_total")).collect();
        assert_eq!(counted, [&format!("session_turns_total{{tier={tier}}}")], "{prompt}");
        assert_eq!(since.get("session_recomputed_tokens_total"), None, "{prompt}");
        before = after;
    }
}

#[tokio::test]
async fn stored_prefixes_and_denominators_are_counted() {
    let state = with_store(1 << 30).await;
    // The counts already include the model's warm-up steps.
    post(&state, json!({"prompt": [5], "max_tokens": 1})).await;
    let before = until(&state, settled).await;
    let body = json!({"prompt": "The lighthouse stood at the end of the world, and nobody", "max_tokens": 4, "temperature": 0});
    let first = post(&state, body.clone()).await.1;
    let middle = until(&state, settled).await;
    let since = middle.since(&before);
    assert_eq!(
        (since.get("prefix_lookups_total{result=miss}"), since.get("prefix_lookups_total{result=hit}")),
        (Some(&1.0), None)
    );
    let usage = |answer: &Value, name: &str| answer["usage"][name].as_f64().unwrap();
    // The model never reads the last sampled token.
    let read = usage(&first, "prompt_tokens") + usage(&first, "completion_tokens") - 1.0;
    assert_eq!(since["attention_denominators_total"], read * 6.0 * 4.0);
    let clamped = since.get("attention_denominators_clamped_total").copied().unwrap_or(0.0);
    assert!(clamped < since["attention_denominators_total"], "{clamped}");

    let again = post(&state, body).await.1;
    let after = until(&state, settled).await;
    let since = after.since(&middle);
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_f64().unwrap();
    assert!(cached > 0.0, "{again}");
    assert_eq!((since["prefix_lookups_total{result=hit}"], since["prompt_tokens_cached_total"]), (1.0, cached));
    assert_eq!(since["prompt_tokens_computed_total"], usage(&again, "prompt_tokens") - cached);
    assert!(after.get("state_bytes{tier=prefixes}") > 0.0 && after.get("prefixes") >= 1.0);
}

#[tokio::test]
async fn a_thousand_unknown_paths_and_methods_are_one_series() {
    // This test uses its own state, because other tests count requests in the shared one.
    let state = AppState::new(ApiOptions::default());
    let before = scraped(&state).await;
    for number in 0..1000 {
        let path =
            if number % 2 == 0 { format!("/nothing/{number}?x={number}") } else { format!("/v1/sessions/{number}") };
        let method = if number % 3 == 0 { format!("M{number}").parse().unwrap() } else { Method::GET };
        send(&state, Request::builder().method(method).uri(path).body(Body::empty()).unwrap()).await;
    }
    let after = scraped(&state).await;
    let new: Vec<&String> = after.samples.keys().filter(|name| !before.samples.contains_key(*name)).collect();
    let labelled = |name: &&&String| name.starts_with("tidegate_http_requests_total{") && !name.contains("/metrics");
    let routes: Vec<&&String> = new.iter().filter(labelled).collect();
    assert!((3..=8).contains(&routes.len()), "{routes:?}");
    assert!(routes.iter().any(|name| name.contains("{route=other,method=other,status=404}")), "{routes:?}");
    assert!(routes.iter().any(|name| name.contains("{route=/v1/sessions/{id},method=other,status=405}")), "{routes:?}");
    let counted: f64 = routes.iter().map(|name| after.samples[**name]).sum();
    assert!(counted >= 1000.0, "{counted}");
}
