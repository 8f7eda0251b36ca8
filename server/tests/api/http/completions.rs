//! `POST /v1/completions` with the shipped checkpoint: formats, seeds, concurrency, prompts.

use crate::common::{get, post, send, shipped, stream, text};
use axum::http::StatusCode;
use serde_json::{Value, json};

fn greedy(prompt: &str, max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true})
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("not an object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

/// Returns the text and token ids of the only choice.
fn choice(answer: &Value) -> (String, Vec<u64>) {
    let choice = &answer["choices"][0];
    let ids = choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    (choice["text"].as_str().unwrap().to_owned(), ids)
}

#[tokio::test]
async fn a_whole_answer_has_openais_format() {
    let (status, answer) = post(&shipped(), greedy("Once upon a time", 8)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(answer["model"], "tidegate-tiny");
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("fp_"));
    let only = &answer["choices"][0];
    assert_eq!(
        (&only["index"], &only["logprobs"], &only["finish_reason"]),
        (&json!(0), &Value::Null, &json!("length"))
    );
    let prompt_ids = only["prompt_token_ids"].as_array().unwrap();
    assert_eq!(prompt_ids[0], 0, "the prompt begins with its special token");
    assert_eq!(only["token_ids"].as_array().unwrap().len(), 8);
    assert!(only["timings"]["prefill_ms"].as_f64().unwrap() > 0.0);
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], prompt_ids.len());
    assert_eq!(usage["completion_tokens"], 8);
    assert_eq!(usage["total_tokens"], prompt_ids.len() + 8);
}

#[tokio::test]
async fn optional_fields_are_absent_unless_requested() {
    let (_, answer) = post(&shipped(), json!({"prompt": "One", "max_tokens": 2, "user": "me", "stream": null})).await;
    let only = answer["choices"][0].as_object().unwrap();
    assert!(!only.contains_key("token_ids") && !only.contains_key("prompt_token_ids"));
    let (_, chunks) = stream(&shipped(), json!({"prompt": "One", "max_tokens": 2, "stream": true})).await;
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn a_stream_gives_the_same_text_and_ids_as_a_whole_answer() {
    let body = greedy("Once upon a time there was", 40);
    let (_, whole) = post(&shipped(), body.clone()).await;
    let more = json!({"stream": true, "stream_options": {"include_usage": true}});
    let (texts, chunks) = stream(&shipped(), with(body, more)).await;
    assert_eq!(texts, [choice(&whole)]);

    let (last, others) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    for tokens in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][tokens], whole["usage"][tokens]);
    }
    assert!(others.iter().all(|chunk| chunk.as_object().unwrap().contains_key("usage") && chunk["usage"].is_null()));
    assert!(chunks.iter().all(|chunk| chunk["id"] == last["id"] && chunk["object"] == "text_completion"));
    let first = &chunks[0]["choices"][0];
    assert_eq!(first["prompt_token_ids"], whole["choices"][0]["prompt_token_ids"]);
    assert!(others[1..].iter().all(|chunk| chunk["choices"][0].get("prompt_token_ids").is_none()));
    let reasons: Vec<&Value> = others.iter().map(|chunk| &chunk["choices"][0]["finish_reason"]).collect();
    assert_eq!(*reasons[reasons.len() - 1], "length");
    assert!(reasons[..reasons.len() - 1].iter().all(|reason| reason.is_null()));
    assert!(others.len() > 10, "the text came in {} chunks", others.len());
}

#[tokio::test]
async fn thirty_two_concurrent_streams_give_the_same_as_alone() {
    let state = shipped();
    let long = "The sea was calm and the boats went out. ".repeat(60);
    let bodies: Vec<Value> = (0..32u32)
        .map(|n| {
            // One prompt takes several prefill chunks, the others are short; half are greedy, half sampled.
            let prompt = if n == 5 { long.clone() } else { format!("Story {n}:{}", " and so on".repeat(n as usize)) };
            let sampling = match n % 2 {
                0 => json!({"temperature": 0}),
                _ => json!({"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "seed": n}),
            };
            let rest = json!({"stream": true, "ignore_eos": true, "return_token_ids": true, "max_tokens": 20 + n});
            with(with(json!({"prompt": prompt}), sampling), rest)
        })
        .collect();
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(stream(&state, body.clone()).await.0);
    }
    let tasks: Vec<_> = bodies
        .into_iter()
        .map(|body| {
            let state = state.clone();
            tokio::spawn(async move { stream(&state, body).await.0 })
        })
        .collect();
    for (n, (task, alone)) in tasks.into_iter().zip(alone).enumerate() {
        assert_eq!(alone[0].1.len(), 20 + n);
        assert_eq!(task.await.unwrap(), alone, "stream {n}");
    }
}

#[tokio::test]
async fn the_same_seed_repeats_a_text() {
    let body = json!({"prompt": "Once", "max_tokens": 30, "temperature": 1.5, "top_p": 1.0, "ignore_eos": true});
    let seeded = |seed: u64| with(body.clone(), json!({"seed": seed}));
    let state = shipped();
    let first = choice(&post(&state, seeded(7)).await.1).0;
    assert_eq!(first, choice(&post(&state, seeded(7)).await.1).0);
    assert_ne!(first, choice(&post(&state, seeded(8)).await.1).0);
    let highest = choice(&post(&state, seeded(u64::MAX)).await.1).0;
    assert_ne!(first, highest);
    // The same 64 bits, as a signed number.
    assert_eq!(highest, choice(&post(&state, with(body.clone(), json!({"seed": -1}))).await.1).0);
    let drawn = choice(&post(&state, body.clone()).await.1).0;
    assert_ne!(drawn, choice(&post(&state, body).await.1).0);
}

#[tokio::test]
async fn ids_and_several_prompts_are_accepted() {
    let state = shipped();
    let texts = ["Once upon a time", "The king"];
    let mut alone = Vec::new();
    let mut ids = Vec::new();
    for text in texts {
        let (_, answer) = post(&state, greedy(text, 12)).await;
        ids.push(answer["choices"][0]["prompt_token_ids"].clone());
        alone.push(choice(&answer));
    }
    let (_, by_ids) = post(&state, with(greedy("", 12), json!({"prompt": ids[0]}))).await;
    assert_eq!(choice(&by_ids), alone[0]);
    for prompts in [json!(texts), json!(ids)] {
        let body = with(greedy("", 12), json!({"prompt": prompts}));
        let (_, both) = post(&state, body.clone()).await;
        assert_eq!(both["choices"].as_array().unwrap().len(), 2);
        assert_eq!(both["choices"][1]["index"], 1);
        assert_eq!(both["choices"][1]["text"], alone[1].0);
        assert_eq!(both["usage"]["completion_tokens"], 24);
        assert_eq!(stream(&state, with(body, json!({"stream": true}))).await.0, alone);
    }
}

#[tokio::test]
async fn an_empty_text_is_a_prompt() {
    let (status, answer) = post(&shipped(), greedy("", 3)).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(answer["choices"][0]["prompt_token_ids"], json!([0]));
}

#[tokio::test]
async fn a_stop_string_is_removed_wherever_its_tokens_are_split() {
    let state = shipped();
    let whole = choice(&post(&state, greedy("Once upon a time", 60)).await.1).0;
    let characters: Vec<char> = whole.chars().collect();
    // A part from the middle of the text, which ends the text at its first occurrence.
    let stop: String = characters[characters.len() / 2..characters.len() / 2 + 3].iter().collect();
    let expected = whole.split(&stop).next().unwrap();
    let body = with(greedy("Once upon a time", 60), json!({"stop": [stop, "\u{1F980} never"]}));
    let (_, answer) = post(&state, body.clone()).await;
    assert_eq!(choice(&answer).0, expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(stream(&state, with(body, json!({"stream": true}))).await.0[0].0, expected);
}

#[tokio::test]
async fn a_bias_can_forbid_and_force_tokens() {
    let state = shipped();
    let plain = choice(&post(&state, greedy("Once", 1)).await.1).1[0];
    let forbid = with(greedy("Once", 1), json!({"logit_bias": {plain.to_string(): -100}}));
    assert_ne!(choice(&post(&state, forbid).await.1).1[0], plain);
    let force = with(greedy("Once", 3), json!({"logit_bias": {"7": 100}}));
    assert_eq!(choice(&post(&state, force).await.1).1, [7, 7, 7]);
}

#[tokio::test]
async fn an_end_of_text_token_ends_a_text_unless_ignored() {
    let state = shipped();
    let body = json!({"prompt": "Once", "max_tokens": 5, "temperature": 0, "logit_bias": {"0": 100},
        "return_token_ids": true});
    let (_, answer) = post(&state, body.clone()).await;
    assert_eq!(choice(&answer), (String::new(), vec![0]));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    let (_, answer) = post(&state, with(body, json!({"ignore_eos": true}))).await;
    assert_eq!(choice(&answer), (String::new(), vec![0; 5]));
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn the_model_is_listed_and_found_only_by_its_name() {
    let state = shipped();
    let list: Value = serde_json::from_str(&text(send(&state, get("/v1/models")).await).await).unwrap();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "tidegate-tiny");
    let one: Value = serde_json::from_str(&text(send(&state, get("/v1/models/tidegate-tiny")).await).await).unwrap();
    assert_eq!(one, list["data"][0]);
    let response = send(&state, get("/v1/models/meta/llama")).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    assert!(text(response).await.contains("model_not_found"));
    let (status, _) = post(&state, with(greedy("x", 1), json!({"model": "tidegate-tiny"}))).await;
    assert_eq!(status, StatusCode::OK);
}
