//! `n` and `best_of`: several texts per prompt, which of them are returned, and in what order.

use super::kit::chat;
use crate::common::{post, shipped, stream, with};
use axum::http::StatusCode;
use serde_json::{Value, json};

/// Returns a sampled request whose texts differ.
#[expect(clippy::needless_pass_by_value, reason = "it is made where it is called")]
fn drawn(prompt: Value) -> Value {
    json!({"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "seed": 7, "ignore_eos": true,
        "return_token_ids": true})
}

fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    for (at, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], at);
    }
    choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn each_choice_equals_a_single_request_with_its_own_seed() {
    let state = shipped();
    let prompts = ["Once upon a time", "The king said to the"];
    let mut alone = Vec::new();
    for prompt in prompts {
        for seed in 7..10 {
            alone.extend(texts(&post(&state, with(drawn(json!(prompt)), json!({"seed": seed}))).await.1));
        }
    }
    let body = with(drawn(json!(prompts)), json!({"n": 3}));
    let (status, answer) = post(&state, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(texts(&answer), alone);
    assert!(alone[0] != alone[1] && alone[1] != alone[2], "the seeds give the same: {alone:?}");
    let streamed = stream(&state, with(body, json!({"stream": true}))).await.0;
    assert_eq!(streamed.into_iter().map(|(text, _)| text).collect::<Vec<_>>(), alone);
}

#[tokio::test]
async fn usage_counts_a_prompt_once_and_every_generated_token() {
    let state = shipped();
    let (_, one) = post(&state, drawn(json!("Once upon a time"))).await;
    let (_, three) = post(&state, with(drawn(json!("Once upon a time")), json!({"n": 3}))).await;
    assert_eq!(three["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    assert_eq!(three["usage"]["completion_tokens"], 36);
    let ranked = with(drawn(json!("Once upon a time")), json!({"best_of": 4, "n": 2}));
    let (status, ranked) = post(&state, ranked).await;
    assert_eq!(status, StatusCode::OK, "{ranked}");
    assert_eq!(ranked["usage"]["completion_tokens"], 48);
    assert_eq!(ranked["choices"].as_array().unwrap().len(), 2);
    for usage in [&one["usage"], &three["usage"], &ranked["usage"]] {
        let number = |name: &str| usage[name].as_u64().unwrap();
        assert_eq!(number("total_tokens"), number("prompt_tokens") + number("completion_tokens"));
    }
}

#[tokio::test]
async fn seeds_wrap_around() {
    let state = shipped();
    let body = with(drawn(json!("Once")), json!({"n": 2, "seed": u64::MAX}));
    let (_, answer) = post(&state, body).await;
    let (_, zero) = post(&state, with(drawn(json!("Once")), json!({"seed": 0}))).await;
    assert_eq!(texts(&answer)[1], texts(&zero)[0]);
}

#[tokio::test]
async fn best_of_returns_the_texts_with_the_best_average_log_probability() {
    let state = shipped();
    let prompts = json!(["Once upon a time", "The sea"]);
    let all = with(drawn(prompts.clone()), json!({"n": 5, "logprobs": 0}));
    let (_, all) = post(&state, all).await;
    let mean = |choice: &Value| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        logprobs.iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>() / logprobs.len() as f64
    };
    let mut expected = Vec::new();
    for prompt in all["choices"].as_array().unwrap().chunks(5) {
        let mut ranked: Vec<&Value> = prompt.iter().collect();
        ranked.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        assert!(mean(ranked[0]) > mean(ranked[4]));
        expected.extend(ranked[..2].iter().map(|choice| choice["text"].as_str().unwrap().to_owned()));
    }
    let (_, best) = post(&state, with(drawn(prompts), json!({"n": 2, "best_of": 5}))).await;
    assert_eq!(texts(&best), expected);
    assert!(best["choices"].as_array().unwrap().iter().all(|choice| choice["logprobs"].is_null()));
}

#[tokio::test]
async fn chat_returns_n_messages() {
    let state = shipped();
    let body = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 10, "seed": 3,
        "temperature": 1.0, "n": 3, "ignore_eos": true});
    let (status, answer) = chat(&state, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (at, choice) in choices.iter().enumerate() {
        let (_, alone) = chat(&state, with(body.clone(), json!({"n": 1, "seed": 3 + at}))).await;
        assert_eq!(choice["index"], at);
        assert_eq!(choice["message"], alone["choices"][0]["message"]);
    }
    assert_eq!(answer["usage"]["completion_tokens"], 30);
}
