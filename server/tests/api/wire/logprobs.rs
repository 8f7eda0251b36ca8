//! Log probabilities: their formats and texts, which are the same in streams and in whole answers.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::kit::{ROUTES, chat, chunks, joined, keys, posting, raw};
use super::script::{byte_token, byte_tokens, recited, tokenizer};
use crate::common::{post, send, shipped, text, with};

fn asking(more: Value) -> Value {
    let body = json!({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true, "repetition_penalty": 1});
    with(body, more)
}

fn list<'a>(choice: &'a Value, name: &str) -> &'a Vec<Value> {
    choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("no {name} in {choice}"))
}

#[tokio::test]
async fn each_token_has_its_text_offset_log_probability_and_alternatives() {
    let state = shipped();
    let (status, answer) = post(&state, asking(json!({"logprobs": 3}))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choice = &answer["choices"][0];
    let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
    let tokens = list(choice, "tokens");
    assert_eq!(tokens.len(), 20);
    let joined: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(joined.chars().collect::<Vec<_>>(), text);
    let mut place = 0;
    for (at, token) in tokens.iter().enumerate() {
        let token = token.as_str().unwrap();
        assert_eq!(list(choice, "text_offset")[at], place);
        place += token.chars().count();
        let own = list(choice, "token_logprobs")[at].as_f64().unwrap();
        assert!(own <= 0.0);
        let top = list(choice, "top_logprobs")[at].as_object().unwrap();
        assert_eq!(top.len(), 3, "{top:?}");
        // Each token is the most likely one at its step.
        assert!(top.values().all(|logprob| logprob.as_f64().unwrap() <= own) && top[token].as_f64() == Some(own));
    }
}

#[tokio::test]
async fn a_token_that_is_not_among_the_likeliest_is_added_to_them() {
    let state = shipped();
    let forced = asking(json!({"logprobs": 2, "logit_bias": {"7": 100}, "max_tokens": 2}));
    let (_, answer) = post(&state, forced).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["token_ids"], json!([7, 7]));
    let top = list(choice, "top_logprobs")[0].as_object().unwrap();
    let own = list(choice, "token_logprobs")[0].as_f64().unwrap();
    assert_eq!(top.len(), 3);
    assert!(own < -1.0, "the log probability includes the bias: {own}");
    assert_eq!(top[list(choice, "tokens")[0].as_str().unwrap()].as_f64(), Some(own));
    let (_, none) = post(&state, asking(json!({"logprobs": 0, "max_tokens": 1}))).await;
    assert_eq!(list(&none["choices"][0], "top_logprobs")[0].as_object().unwrap().len(), 1);
}

#[tokio::test]
async fn a_stream_contains_the_same_as_a_whole_answer() {
    let state = shipped();
    let (_, plain) = post(&state, asking(json!({}))).await;
    let text = plain["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(20).take(4).collect();
    for more in [json!({}), json!({"stop": [stop]}), json!({"stop": ["never said", "\u{1F980}"]}), json!({"n": 2})] {
        let body = asking(with(json!({"logprobs": 2}), more));
        let (_, whole) = post(&state, body.clone()).await;
        let streamed = joined(&chunks(&state, ROUTES[0], body).await);
        for (whole, streamed) in whole["choices"].as_array().unwrap().iter().zip(&streamed) {
            for field in ["text", "finish_reason", "stop_reason", "logprobs"] {
                assert_eq!(whole[field], streamed[field], "{field}");
            }
            assert!(!list(whole, "tokens").is_empty());
        }
    }
}

#[tokio::test]
async fn tokens_removed_by_a_stop_string_are_not_returned() {
    let (state, _thread) = recited(vec![byte_tokens(b"one two three")]);
    for (stop, tokens) in [("two", 4), ("t", 4), ("one", 0), ("e two", 2), ("never", 14)] {
        let body = json!({"prompt": [5], "max_tokens": 30, "temperature": 0, "logprobs": 1, "stop": stop});
        let (_, whole) = post(&state, body.clone()).await;
        let choice = &whole["choices"][0];
        assert_eq!(list(choice, "tokens").len(), tokens, "{stop}: {choice}");
        assert_eq!(
            joined(&chunks(&state, ROUTES[0], body).await)[0]["logprobs"]["tokens"].as_array().map_or(0, Vec::len),
            tokens
        );
        let expected = if stop == "never" { Value::Null } else { stop.into() };
        assert_eq!(choice["stop_reason"], expected);
        if stop == "never" {
            assert_eq!(list(choice, "tokens")[13], "<|endoftext|>");
            assert_eq!(list(choice, "text_offset")[13], 13);
        }
    }
}

#[tokio::test]
async fn tokens_that_are_not_whole_characters_are_returned_as_bytes() {
    let (state, _thread) = recited(vec![byte_tokens("a☃b".as_bytes())]);
    let body = json!({"prompt": [5], "max_tokens": 30, "temperature": 0, "logprobs": 0});
    let (_, answer) = post(&state, body.clone()).await;
    let choice = &answer["choices"][0];
    let tokens = json!(["a", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "b", "<|endoftext|>"]);
    assert_eq!((&choice["text"], &choice["logprobs"]["tokens"]), (&json!("a☃b"), &tokens));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1, 1, 1, 2, 3]));
    assert_eq!(joined(&chunks(&state, ROUTES[0], body.clone()).await)[0]["logprobs"], choice["logprobs"]);
    let (_, named) = post(&state, with(body, json!({"return_tokens_as_token_ids": true}))).await;
    let ids: Vec<String> =
        byte_tokens("a☃b".as_bytes()).iter().chain(&[0]).map(|id| format!("token_id:{id}")).collect();
    assert_eq!(named["choices"][0]["logprobs"]["tokens"], json!(ids));
}

#[tokio::test]
async fn chat_has_its_own_format_without_the_end_token() {
    let state = shipped();
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "temperature": 0,
        "repetition_penalty": 1,
        "logprobs": true, "top_logprobs": 2, "ignore_eos": true});
    let (status, answer) = chat(&state, body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["logprobs"]["refusal"], Value::Null);
    let content = list(choice, "content");
    assert_eq!(content.len(), 12);
    let mut bytes = Vec::new();
    for token in content {
        assert_eq!(keys(token), ["bytes", "logprob", "token", "top_logprobs"]);
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        assert!(top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64());
        assert_eq!((&top[0]["token"], &top[0]["logprob"]), (&token["token"], &token["logprob"]));
        assert_eq!(keys(&top[0]), ["bytes", "logprob", "token"]);
        bytes.extend(
            token["bytes"].as_array().unwrap().iter().map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap()),
        );
    }
    assert_eq!(String::from_utf8(bytes).unwrap(), choice["message"]["content"].as_str().unwrap());
    assert_eq!(
        joined(&chunks(&state, ROUTES[1], body.clone()).await)[0]["logprobs"]["content"],
        choice["logprobs"]["content"]
    );

    let ended = with(body.clone(), json!({"ignore_eos": false, "logit_bias": {"0": 100}}));
    let (_, ended) = chat(&state, ended).await;
    assert_eq!(ended["choices"][0]["logprobs"], json!({"content": [], "refusal": null}));
    for off in [json!({"logprobs": false, "top_logprobs": 0}), json!({"logprobs": null, "top_logprobs": null})] {
        let (status, answer) = chat(&state, with(body.clone(), off)).await;
        assert_eq!((status, &answer["choices"][0]["logprobs"]), (StatusCode::OK, &Value::Null));
    }
}

#[tokio::test]
async fn a_stop_token_ends_a_text_and_is_returned_as_the_reason() {
    let tokens = byte_tokens(b"one two");
    let (state, _thread) = recited(vec![tokens.clone()]);
    let space = tokens[3];
    let body = json!({"prompt": [5], "max_tokens": 30, "temperature": 0, "stop_token_ids": [space], "logprobs": 0});
    let (_, answer) = post(&state, body.clone()).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("one"), &json!("stop")));
    assert_eq!((&choice["stop_reason"], &answer["usage"]["completion_tokens"]), (&json!(space), &json!(4)));
    assert_eq!(joined(&chunks(&state, ROUTES[0], body.clone()).await)[0]["stop_reason"], space);
    let (_, later) = post(&state, with(body, json!({"min_tokens": 5}))).await;
    assert!(later["usage"]["completion_tokens"].as_u64() >= Some(5), "{later}");
    assert_ne!(tokenizer().vocabulary().bytes(space), b"");
}

#[tokio::test]
async fn an_answer_takes_less_than_what_is_reserved_for_its_log_probabilities() {
    // The server reserves 128 bytes per entry; until the answer is written, each entry also takes 8 bytes in a list.
    const MOST: usize = 112;
    let state = shipped();
    let message = json!([{"role": "user", "content": "Once upon a time"}]);
    for (path, body) in [
        (ROUTES[0], json!({"prompt": "Once upon a time", "max_tokens": 60, "logprobs": 20})),
        (ROUTES[0], json!({"prompt": "Once upon a time", "max_tokens": 60, "logprobs": 0})),
        (ROUTES[1], json!({"messages": message, "max_tokens": 60, "logprobs": true, "top_logprobs": 20})),
        (ROUTES[1], json!({"messages": message, "max_tokens": 60, "logprobs": true})),
        ("/completion", json!({"prompt": "Once upon a time", "n_predict": 60, "n_probs": 20})),
        ("/completion", json!({"prompt": "Once upon a time", "n_predict": 60, "n_probs": 1})),
    ] {
        let (_, answer) = raw(&state, path, with(body.clone(), json!({"ignore_eos": true})).to_string()).await;
        let listed = body["logprobs"].as_u64().or(body["top_logprobs"].as_u64()).or(body["n_probs"].as_u64());
        let lists = answer["choices"][0].get("logprobs").unwrap_or(&answer["completion_probabilities"]);
        let each = lists.to_string().len() / (60 * (listed.unwrap_or(0) as usize + 1));
        assert!((15..MOST).contains(&each), "{path} {listed:?}: {each} bytes");
    }
}

/// Returns the JSON value of a field as it was written, with each fraction replaced by `N`.
fn written(answer: &str, field: &str) -> String {
    let fraction = regex::Regex::new(r"-?\d+\.\d+(e-?\d+)?").unwrap();
    let value = answer.split_once(&format!(r#""{field}":"#)).unwrap_or_else(|| panic!("no {field} in {answer}")).1;
    let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
    values.next().unwrap().unwrap();
    fraction.replace_all(&value[..values.byte_offset()], "N").into_owned()
}

#[tokio::test]
async fn log_probabilities_are_written_as_they_always_were() {
    let (state, _thread) = recited(vec![byte_tokens("a☃".as_bytes())]);
    let ask = async |path: &str, body: Value| text(send(&state, posting(path, body.to_string())).await).await;
    let answer = ask(ROUTES[0], json!({"prompt": [5], "max_tokens": 2, "temperature": 0, "logprobs": 1})).await;
    let lists = r#"{"tokens":["a","bytes:\\xe2"],"token_logprobs":[N,N],"top_logprobs":[{"a":N},{"bytes:\\xe2":N}],"text_offset":[0,1]}"#;
    assert_eq!(written(&answer, "logprobs"), lists);
    let answer = ask("/completion", json!({"prompt": [5], "n_predict": 2, "temperature": 0, "n_probs": 1})).await;
    let [a, snow] = [byte_token(b'a'), byte_token(0xe2)];
    let token = |id: u32, text: &str, byte: u8| format!(r#""id":{id},"token":"{text}","bytes":[{byte}],"logprob":N"#);
    let [a, snow] = [token(a, "a", 97), token(snow, "\u{fffd}", 226)];
    let probabilities = format!(r#"[{{{a},"top_logprobs":[{{{a}}}]}},{{{snow},"top_logprobs":[{{{snow}}}]}}]"#);
    assert_eq!(written(&answer, "completion_probabilities"), probabilities);

    let message = json!([{"role": "user", "content": "Hello"}]);
    let forced = json!({"messages": message, "max_tokens": 1, "logprobs": true, "logit_bias": {"300": 100}});
    let name = tokenizer().vocabulary().bytes(300).to_vec();
    let answer = text(send(&shipped(), posting(ROUTES[1], forced.to_string())).await).await;
    let (text, bytes) = (json!(String::from_utf8(name.clone()).unwrap()), json!(name));
    let content =
        format!(r#"{{"content":[{{"token":{text},"logprob":N,"bytes":{bytes},"top_logprobs":[]}}],"refusal":null}}"#);
    assert_eq!(written(&answer, "logprobs"), content);
}
