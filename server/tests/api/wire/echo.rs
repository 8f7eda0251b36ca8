//! `echo`: the prompt's own text and log probabilities in front of its completion.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::kit::{ROUTES, chunks, joined};
use super::script::{byte_tokens, recited};
use crate::common::{post, shipped, with};

fn asking(prompt: impl Into<Value>, more: Value) -> Value {
    let prompt: Value = prompt.into();
    with(json!({"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true, "echo": true}), more)
}

fn choice(answer: &Value) -> &Value {
    &answer["choices"][0]
}

#[tokio::test]
async fn the_prompt_stands_in_front_of_every_text() {
    let state = shipped();
    let prompts = ["Once upon a time", "Zoë's ☃"];
    for more in [json!({}), json!({"n": 2}), json!({"return_token_ids": true})] {
        let body = asking(json!(prompts), more);
        let (_, plain) = post(&state, with(body.clone(), json!({"echo": false}))).await;
        let (status, echoed) = post(&state, body.clone()).await;
        assert_eq!(status, StatusCode::OK, "{echoed}");
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(echoed["usage"][name], plain["usage"][name]);
        }
        let streamed = joined(&chunks(&state, ROUTES[0], body).await);
        let texts = echoed["choices"].as_array().unwrap();
        for (at, text) in texts.iter().enumerate() {
            let prompt = prompts[at * prompts.len() / texts.len()];
            assert_eq!(text["text"], format!("{prompt}{}", plain["choices"][at]["text"].as_str().unwrap()));
            assert_eq!(text["text"], streamed[at]["text"]);
            assert_eq!(text["token_ids"], plain["choices"][at]["token_ids"]);
        }
    }
}

#[tokio::test]
async fn a_prompt_of_ids_is_told_as_its_text() {
    let state = shipped();
    let (_, by_text) = post(&state, asking("Once upon a ☃", json!({"return_token_ids": true}))).await;
    let ids = choice(&by_text)["prompt_token_ids"].clone();
    let (_, by_ids) = post(&state, asking(ids, json!({}))).await;
    assert_eq!(choice(&by_ids)["text"], choice(&by_text)["text"]);
}

#[tokio::test]
async fn a_prompt_can_be_scored_without_a_text() {
    let state = shipped();
    let body = asking("Once upon a time", json!({"max_tokens": 0, "logprobs": 1}));
    let (status, answer) = post(&state, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let scored = choice(&answer);
    assert_eq!((&scored["text"], &scored["finish_reason"]), (&json!("Once upon a time"), &json!("length")));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let lists = &scored["logprobs"];
    assert_eq!((&lists["tokens"][0], &lists["text_offset"][0]), (&json!("<|endoftext|>"), &json!(0)));
    assert_eq!((&lists["token_logprobs"][0], &lists["top_logprobs"][0]), (&Value::Null, &Value::Null));
    let tokens: String = lists["tokens"].as_array().unwrap()[1..].iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens, "Once upon a time");
    assert!(lists["token_logprobs"].as_array().unwrap()[1..].iter().all(|logprob| logprob.as_f64().unwrap() < 0.0));
    // The result is the same now that a prefix of the prompt may be cached.
    let (_, again) = post(&state, body.clone()).await;
    assert_eq!(&choice(&again)["logprobs"], lists);
    assert_eq!(&joined(&chunks(&state, ROUTES[0], body.clone()).await)[0]["logprobs"], lists);
    let (status, refused) = post(&state, with(body, json!({"echo": false}))).await;
    assert_eq!((status, &refused["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("max_tokens")));
}

#[tokio::test]
async fn a_text_scored_as_a_prompt_has_the_log_probabilities_that_it_was_made_with() {
    let state = shipped();
    let body = asking("The king", json!({"logprobs": 2, "return_token_ids": true, "max_tokens": 15}));
    let (_, made) = post(&state, body.clone()).await;
    let made = choice(&made);
    let ids: Vec<Value> =
        ["prompt_token_ids", "token_ids"].iter().flat_map(|name| made[name].as_array().unwrap().clone()).collect();
    let (_, scored) = post(&state, with(body.clone(), json!({"prompt": ids, "max_tokens": 0}))).await;
    let scored = choice(&scored);
    for name in ["tokens", "text_offset"] {
        assert_eq!(made["logprobs"][name], scored["logprobs"][name]);
    }
    let numbers = |choice: &Value| -> Vec<f64> {
        choice["logprobs"]["token_logprobs"].as_array().unwrap()[1..].iter().map(|n| n.as_f64().unwrap()).collect()
    };
    for (at, (made, scored)) in numbers(made).into_iter().zip(numbers(scored)).enumerate() {
        assert!((made - scored).abs() < 1e-3, "token {at}: {made} and {scored}");
    }
    assert_eq!(joined(&chunks(&state, ROUTES[0], body).await)[0]["logprobs"], made["logprobs"]);
}

#[tokio::test]
async fn a_character_that_the_prompt_has_begun_is_finished_by_the_text() {
    let snowman = byte_tokens("☃".as_bytes());
    // The script has a line for each of the prompt's two tokens; the last line completes the character.
    let (state, _thread) = recited(vec![Vec::new(), vec![snowman[2], byte_tokens(b"!")[0]]]);
    let body = json!({"prompt": &snowman[..2], "max_tokens": 9, "temperature": 0, "logprobs": 0});
    let (_, plain) = post(&state, body.clone()).await;
    assert_eq!(choice(&plain)["text"], "☃!");
    assert_eq!(choice(&plain)["logprobs"]["text_offset"], json!([0, 1, 2]));
    let (_, echoed) = post(&state, with(body.clone(), json!({"echo": true}))).await;
    assert_eq!(choice(&echoed)["text"], "☃!");
    assert_eq!(choice(&echoed)["logprobs"]["text_offset"], json!([0, 0, 0, 1, 2]));
    assert_eq!(joined(&chunks(&state, ROUTES[0], with(body.clone(), json!({"echo": true}))).await)[0]["text"], "☃!");
    let (_, scored) = post(&state, with(body, json!({"echo": true, "max_tokens": 0}))).await;
    assert_eq!(choice(&scored)["text"], "\u{FFFD}");
}

#[tokio::test]
async fn a_token_begins_after_the_bytes_that_it_has_shown_to_be_none_of_its_character() {
    let tokens = |bytes: &[&[u8]]| byte_tokens(&bytes.concat());
    let table = [
        (tokens(&[&[0xE2], b"!"]), "\u{FFFD}!", json!([0, 1, 2])),
        (tokens(&[&[0xE2, 0x98], b"a", "é".as_bytes()]), "\u{FFFD}aé", json!([0, 0, 1, 2, 2, 3])),
        (tokens(&[&[0xE2, 0xE2, 0x98, 0x83]]), "\u{FFFD}☃", json!([0, 1, 1, 1, 2])),
        (tokens(&["\u{FFFD}".as_bytes(), b"!"]), "\u{FFFD}!", json!([0, 0, 0, 1, 2])),
    ];
    for (answer, text, offsets) in table {
        let (state, _thread) = recited(vec![Vec::new(), answer]);
        let body = json!({"prompt": "x", "max_tokens": 9, "temperature": 0, "logprobs": 0});
        let (_, whole) = post(&state, body.clone()).await;
        assert_eq!((&choice(&whole)["text"], &choice(&whole)["logprobs"]["text_offset"]), (&json!(text), &offsets));
        assert_eq!(joined(&chunks(&state, ROUTES[0], body).await)[0]["logprobs"], choice(&whole)["logprobs"]);
    }
}

#[tokio::test]
async fn a_special_token_in_a_given_text_stands_there_as_it_was_written() {
    let state = shipped();
    let (_, answer) = post(&state, asking("a<|endoftext|>é b", json!({"max_tokens": 0, "logprobs": 0}))).await;
    assert_eq!(choice(&answer)["text"], "a<|endoftext|>é b");
    let tokens = choice(&answer)["logprobs"]["tokens"].as_array().unwrap();
    let offsets = choice(&answer)["logprobs"]["text_offset"].as_array().unwrap();
    let of = |name: &str| &offsets[tokens.iter().rposition(|token| token == name).unwrap()];
    assert_eq!((of("a"), of("<|endoftext|>"), of(" b")), (&json!(0), &json!(1), &json!(15)));
}
