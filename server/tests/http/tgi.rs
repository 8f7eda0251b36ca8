//! The routes of text-generation-inference: what its clients send and read.

use std::io::Write;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::fake::Fake;
use crate::common::{events, get, scripted, send, shipped, text, with};
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::{AppState, Keys};

async fn ask(state: &AppState, path: &str, body: &Value) -> Response<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    send(state, request.body(Body::from(body.to_string())).unwrap()).await
}

async fn answered(path: &str, body: Value) -> Value {
    let response = ask(&shipped(), path, &body).await;
    let (status, answer) = (response.status(), text(response).await);
    assert_eq!(status, StatusCode::OK, "{body}: {answer}");
    serde_json::from_str(&answer).unwrap()
}

fn asking(inputs: &str, parameters: Value) -> Value {
    json!({"inputs": inputs, "parameters": with(json!({"max_new_tokens": 12}), parameters)})
}

async fn generated(inputs: &str, parameters: Value) -> Value {
    answered("/generate", asking(inputs, parameters)).await
}

async fn completion(prompt: &str, more: Value) -> Value {
    let body = with(json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": true}), more);
    answered("/v1/completions", body).await["choices"][0].clone()
}

async fn streamed(path: &str, body: Value) -> Vec<Value> {
    let response = ask(&shipped(), path, &body).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    events(&text(response).await).iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn ids(tokens: &Value) -> Vec<Value> {
    tokens.as_array().unwrap().iter().map(|token| token["id"].clone()).collect()
}

fn together(tokens: &Value) -> String {
    tokens.as_array().unwrap().iter().map(|token| token["text"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_text_is_that_of_the_openai_route_and_greedy_by_itself() {
    let same = completion("The king", json!({})).await;
    assert_eq!(generated("The king", json!({})).await, json!({"generated_text": same["text"]}));
    let told = generated("The king", json!({"details": true})).await;
    let details = &told["details"];
    assert_eq!(told["generated_text"], same["text"]);
    assert_eq!((&details["finish_reason"], &details["generated_tokens"]), (&json!("length"), &json!(12)));
    assert_eq!((&details["seed"], &details["prefill"]), (&Value::Null, &json!([])));
    assert_eq!(
        (json!(ids(&details["tokens"])), json!(together(&details["tokens"]))),
        (same["token_ids"].clone(), same["text"].clone())
    );
    assert!(details["tokens"].as_array().unwrap().iter().all(|token| token["special"] == false));
    let full = generated("The king", json!({"return_full_text": true})).await;
    assert_eq!(full["generated_text"], format!("The king{}", same["text"].as_str().unwrap()));
}

#[tokio::test]
async fn drawn_texts_are_the_same_with_the_same_seed_and_the_formats_own_defaults() {
    let drawn = generated("The king", json!({"do_sample": true, "seed": 7, "details": true})).await;
    let plain = json!({"temperature": 1, "top_p": 1, "seed": 7});
    assert_eq!(drawn["generated_text"], completion("The king", plain).await["text"]);
    assert_eq!(drawn["details"]["seed"], 7);
    let how = json!({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "typical_p": 0.95, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "seed": 7});
    let drawn = generated("The king", how.clone()).await;
    assert_eq!(drawn["generated_text"], completion("The king", how).await["text"]);
}

#[tokio::test]
async fn a_stream_has_an_event_for_each_token_and_the_last_has_the_whole() {
    let told = generated("The king", json!({"details": true})).await;
    let events = streamed("/generate_stream", asking("The king", json!({}))).await;
    assert_eq!(events.len(), 12);
    let (last, before) = events.split_last().unwrap();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["index"], at + 1);
        let (token, same) = (&event["token"], &told["details"]["tokens"][at]);
        assert_eq!((&token["id"], &token["text"]), (&same["id"], &same["text"]));
    }
    for event in before {
        assert_eq!((&event["generated_text"], &event["details"]), (&Value::Null, &Value::Null));
    }
    assert_eq!(last["generated_text"], told["generated_text"]);
    let details = json!({"finish_reason": "length", "generated_tokens": 12, "input_length": 3, "seed": null});
    assert_eq!(last["details"], details);
}

#[tokio::test]
async fn the_root_answers_either_way() {
    let told = generated("The king", json!({})).await;
    let full = format!("The king{}", told["generated_text"].as_str().unwrap());
    let whole = answered("/", asking("The king", json!({}))).await;
    assert_eq!(whole, json!([{"generated_text": full}]), "a list, with the prompt in front");
    let bare = answered("/", asking("The king", json!({"return_full_text": false}))).await;
    assert_eq!(bare, json!([told]));
    let stream = with(asking("The king", json!({"return_full_text": false})), json!({"stream": true}));
    let events = streamed("/", stream).await;
    assert_eq!(events.last().unwrap()["generated_text"], told["generated_text"]);
    let page = send(&shipped(), get("/")).await;
    assert!(text(page).await.starts_with("<!doctype html>"), "the page stays where it is");
}

#[tokio::test]
async fn what_ends_a_text_is_in_it() {
    let whole = generated("The king", json!({"details": true})).await;
    let tokens = whole["details"]["tokens"].as_array().unwrap();
    let stop = tokens[4]["text"].as_str().unwrap();
    let first = tokens.iter().position(|token| token["text"] == stop).unwrap();
    let told = generated("The king", json!({"details": true, "stop": [stop]})).await;
    let tokens: Value = tokens[..=first].into();
    assert_eq!(ids(&told["details"]["tokens"]), ids(&tokens));
    assert_eq!(told["generated_text"], together(&tokens));
    assert_eq!(told["details"]["finish_reason"], "stop_sequence");
    let events = streamed("/generate_stream", asking("The king", json!({"stop": [stop]}))).await;
    assert_eq!(events.last().unwrap()["generated_text"], together(&tokens));
    assert_eq!(events.len(), first + 1);
}

#[tokio::test]
async fn tokens_of_text_and_prompt_come_with_their_log_probabilities() {
    let told = generated("The king", json!({"decoder_input_details": true, "top_n_tokens": 2})).await;
    let same = completion("The king", json!({"echo": true, "logprobs": 2})).await;
    let details = &told["details"];
    let parts = [&details["prefill"], &details["tokens"]];
    let tokens = parts.iter().flat_map(|part| part.as_array().unwrap());
    let logprobs: Vec<&Value> = tokens.map(|token| &token["logprob"]).collect();
    assert_eq!(json!(logprobs), same["logprobs"]["token_logprobs"]);
    assert_eq!((logprobs[0], &details["prefill"][0]["text"]), (&Value::Null, &json!("<|endoftext|>")));
    let top = details["top_tokens"].as_array().unwrap();
    assert!(top.len() == 12 && top.iter().all(|top| top.as_array().unwrap().len() == 2), "{details}");
}

#[tokio::test]
async fn the_best_of_several_is_told_with_the_others() {
    let parameters = json!({"best_of": 3, "do_sample": true, "details": true, "max_new_tokens": 6});
    let told = generated("The king", parameters).await;
    let details = &told["details"];
    let others = details["best_of_sequences"].as_array().unwrap();
    assert_eq!(others.len(), 2);
    let likelihood = |details: &Value| -> f64 {
        let tokens = details["tokens"].as_array().unwrap();
        tokens.iter().map(|token| token["logprob"].as_f64().unwrap()).sum::<f64>() / tokens.len() as f64
    };
    assert!(others.iter().all(|other| likelihood(other) <= likelihood(details)), "{told}");
}

#[tokio::test]
async fn a_form_is_followed() {
    let regex = json!({"grammar": {"type": "regex", "value": "[0-9]{4}"}});
    let told = generated("x", regex).await;
    let text = told["generated_text"].as_str().unwrap();
    assert!(text.len() == 4 && text.bytes().all(|byte| byte.is_ascii_digit()), "{told}");
}

#[tokio::test]
async fn a_prompt_is_cut_at_its_beginning_and_told_of() {
    let long = "Once there was a fox. The king";
    let last = answered("/tokenize", json!({"prompt": long})).await["tokens"].as_array().unwrap().clone();
    let last = &last[last.len() - 4..];
    let cut = generated(long, json!({"truncate": 4})).await;
    let body = json!({"prompt": last, "max_tokens": 12, "temperature": 0});
    assert_eq!(cut["generated_text"], answered("/v1/completions", body).await["choices"][0]["text"]);
    let same = generated(long, json!({"truncate": 1000})).await;
    assert_eq!(same["generated_text"], completion(long, json!({})).await["text"]);
}

#[tokio::test]
async fn what_cannot_be_right_is_refused_by_name_in_the_formats_shape() {
    for (param, parameters) in [
        ("max_new_tokens", json!({"max_new_tokens": 0})),
        ("max_new_tokens", json!({"max_new_tokens": -1})),
        ("max_new_tokens", json!({"max_new_tokens": u64::MAX})),
        ("temperature", json!({"temperature": 0})),
        ("temperature", json!({"temperature": 3})),
        ("top_k", json!({"top_k": 0})),
        ("top_k", json!({"top_k": -1})),
        ("top_p", json!({"top_p": 1.1})),
        ("typical_p", json!({"typical_p": 0})),
        ("repetition_penalty", json!({"repetition_penalty": 0})),
        ("frequency_penalty", json!({"frequency_penalty": 3})),
        ("seed", json!({"seed": -1})),
        ("stop", json!({"stop": [""]})),
        ("stop", json!({"stop": "x"})),
        ("truncate", json!({"truncate": 0})),
        ("watermark", json!({"watermark": true})),
        ("adapter_id", json!({"adapter_id": "x"})),
        ("grammar", json!({"grammar": {"type": "regex", "value": "("}})),
        ("grammar", json!({"grammar": {"type": "json", "value": "{"}})),
        ("grammar", json!({"grammar": {"type": "json", "value": {"type": "nothing"}}})),
        ("grammar", json!({"grammar": {"type": "gbnf", "value": "x"}})),
        ("top_n_tokens", json!({"top_n_tokens": 21})),
        ("best_of", json!({"best_of": 0})),
        ("best_of", json!({"best_of": 9, "do_sample": true})),
        ("best_of", json!({"best_of": 2})),
        ("seed", json!({"best_of": 2, "do_sample": true, "seed": 1})),
    ] {
        let response = ask(&shipped(), "/generate", &asking("x", parameters.clone())).await;
        let (status, answer) = (response.status(), text(response).await);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{parameters}: {answer}");
        assert_eq!(answer["error_type"], "validation");
        assert!(answer["error"].as_str().unwrap().contains(param), "{parameters}: {answer}");
    }
    for (path, param, body) in [
        ("/generate", "inputs", json!({})),
        ("/", "inputs", json!({"inputs": 1})),
        ("/", "stream", json!({"inputs": "x", "stream": "yes"})),
        ("/generate_stream", "best_of", asking("x", json!({"best_of": 2, "do_sample": true}))),
        ("/generate_stream", "decoder_input_details", asking("x", json!({"decoder_input_details": true}))),
    ] {
        let response = ask(&shipped(), path, &body).await;
        assert_eq!(response.status(), StatusCode::UNPROCESSABLE_ENTITY);
        assert!(text(response).await.contains(param), "{path} {body}");
    }
}

#[tokio::test]
async fn a_failure_in_mid_stream_is_an_error_event_and_the_last() {
    let fake = Fake::new(1);
    let calls = fake.calls();
    let (state, ..) = scripted(fake, 1);
    calls.panic_next_step.store(true, SeqCst);
    let stream = text(ask(&state, "/generate_stream", &asking("", json!({}))).await).await;
    let last: Value = serde_json::from_str(events(&stream).last().unwrap()).unwrap();
    assert_eq!(last["error_type"], "generation", "{stream}");
}

#[tokio::test]
async fn the_root_is_open_to_readers_alone_where_there_are_keys() {
    let (state, ..) = scripted(Fake::new(1), 1);
    let file = json!({"keys": [{"name": "a", "key": "a-key-that-is-long-enough-0123456789"}]});
    let mut written = tempfile::NamedTempFile::new().unwrap();
    written.write_all(file.to_string().as_bytes()).unwrap();
    state.set_api_keys(Keys::load(Some(written.path()), &[]).unwrap().unwrap());
    assert_eq!(send(&state, get("/")).await.status(), StatusCode::OK);
    let refused = ask(&state, "/", &asking("", json!({}))).await;
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
    assert!(text(refused).await.contains(r#""error_type":"authentication""#));
}

#[tokio::test]
async fn the_server_tells_of_itself() {
    let response = send(&shipped(), get("/info")).await;
    assert_eq!(response.status(), StatusCode::OK);
    let info: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!((&info["model_id"], &info["model_pipeline_tag"]), (&json!("tidegate-tiny"), &json!("text-generation")));
    assert_eq!((&info["max_input_tokens"], &info["max_total_tokens"]), (&json!(1_000_000), &json!(2_000_000)));
    assert_eq!((&info["max_stop_sequences"], &info["max_best_of"]), (&json!(16), &json!(8)));
}
