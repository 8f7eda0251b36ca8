//! Extreme numbers and wrong types in every field of both routes, and deep or wide bodies. Each gets an answer or an error
//! that names the field, never a failure.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::kit::{ROUTES, raw};
use crate::common::shipped;

/// Every numeric field, and whether completions and chat read it.
const NUMBERS: [(&str, bool, bool); 21] = [
    ("max_tokens", true, true),
    ("max_completion_tokens", false, true),
    ("n", true, true),
    ("best_of", true, true),
    ("logprobs", true, true),
    ("top_logprobs", true, true),
    ("min_tokens", true, true),
    ("seed", true, true),
    ("temperature", true, true),
    ("top_p", true, true),
    ("top_k", true, true),
    ("min_p", true, true),
    ("typical_p", true, true),
    ("repetition_penalty", true, true),
    ("frequency_penalty", true, true),
    ("presence_penalty", true, true),
    ("length_penalty", true, true),
    ("prompt_logprobs", true, true),
    ("truncate_prompt_tokens", true, true),
    ("stop_token_ids", true, true),
    ("allowed_token_ids", true, true),
];

/// Fields that are not numbers.
const OTHERS: [&str; 22] = [
    "model",
    "stop",
    "stream",
    "stream_options",
    "logit_bias",
    "echo",
    "suffix",
    "ignore_eos",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "add_special_tokens",
    "session",
    "label",
    "on_disconnect",
    "state",
    "return_state",
    "bad_words",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "use_beam_search",
    "prompt_embeds",
    "logits_processors",
];

/// JSON values, as written in a body.
const VALUES: [&str; 36] = [
    "0",
    "-0",
    "-0.0",
    "1",
    "-1",
    "1.5",
    "2.0",
    "128",
    "129",
    "255",
    "256",
    "4095",
    "4096",
    "2147483647",
    "2147483648",
    "-2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775808",
    "-9223372036854775809",
    "18446744073709551615",
    "18446744073709551616",
    "1e400",
    "-1e400",
    "1e308",
    "5e-324",
    "123456789012345678901234567890",
    "\"NaN\"",
    "\"1\"",
    "true",
    "{}",
    "[[[]]]",
    "{\"include_usage\": 18446744073709551616}",
];

fn start(path: &str) -> &'static str {
    if path == ROUTES[0] { r#""prompt": "x""# } else { r#""messages": [{"role": "user", "content": "x"}]"# }
}

/// Checks that the response is an answer or an error that names `field`; returns whether it is an answer.
async fn check(path: &str, field: &str, body: String) -> bool {
    let (status, answer) = raw(&shipped(), path, body.clone()).await;
    match status {
        StatusCode::OK => true,
        StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND | StatusCode::NOT_IMPLEMENTED => {
            assert_eq!(answer["error"]["param"], field, "{path} {body}: {answer}");
            assert!(answer["error"]["message"].as_str().unwrap().contains(field), "{answer}");
            false
        }
        status => panic!("{status} for {path} {body}: {answer}"),
    }
}

#[tokio::test]
async fn every_extreme_number_is_accepted_or_named() {
    let (mut taken, mut refused) = (0, 0);
    for (path, at) in ROUTES.into_iter().zip(0..) {
        for (field, completions, chat) in NUMBERS {
            for value in VALUES {
                let known = if at == 0 { completions } else { chat };
                // Texts are short, unless the field sets their length.
                let short = if field == "max_tokens" { "" } else { ", \"max_tokens\": 1" };
                let short = if field == "max_completion_tokens" { "" } else { short };
                let long = matches!(field, "max_tokens" | "max_completion_tokens" | "n" | "best_of");
                if long
                    && value.parse::<f64>().is_ok_and(|number| (5.0..2e6).contains(&number) && number.fract() == 0.0)
                {
                    continue;
                }
                let body = format!("{{{}{short}, \"{field}\": {value}}}", start(path));
                if check(path, field, body).await {
                    assert!(known, "{field} is taken at {path}");
                    taken += 1;
                } else {
                    refused += 1;
                }
                // The same value inside a list.
                let body = format!("{{{}{short}, \"{field}\": [{value}]}}", start(path));
                check(path, field, body).await;
            }
        }
    }
    assert!(taken > 100 && refused > 1000, "{taken} taken, {refused} refused");
}

#[tokio::test]
async fn every_other_field_refuses_wrong_types() {
    for path in ROUTES {
        for field in OTHERS {
            for value in VALUES {
                // Streams are covered by other tests.
                if (field == "stream" && value == "true") || (field == "stream_options" && value.starts_with('{')) {
                    continue;
                }
                let body = format!("{{{}, \"max_tokens\": 1, \"{field}\": {value}}}", start(path));
                check(path, field, body).await;
            }
        }
    }
}

#[tokio::test]
async fn extreme_ids_and_biases_are_accepted_or_named() {
    for value in VALUES {
        check(ROUTES[0], "prompt", format!(r#"{{"prompt": [{value}], "max_tokens": 1}}"#)).await;
        check(ROUTES[0], "prompt", format!(r#"{{"prompt": [[{value}], [1]], "max_tokens": 1}}"#)).await;
        check(
            ROUTES[0],
            "logit_bias",
            format!(r#"{{"prompt": "x", "max_tokens": 1, "logit_bias": {{"1": {value}}}}}"#),
        )
        .await;
        let key = value.replace('"', "");
        if !key.contains('{') {
            let body = format!(r#"{{"prompt": "x", "max_tokens": 1, "logit_bias": {{"{key}": 1}}}}"#);
            check(ROUTES[0], "logit_bias", body).await;
        }
        check(ROUTES[1], "messages", format!(r#"{{"messages": [{value}], "max_tokens": 1}}"#)).await;
        let content = format!(r#"{{"messages": [{{"role": "user", "content": {value}}}], "max_tokens": 1}}"#);
        check(ROUTES[1], "messages", content).await;
    }
}

#[tokio::test]
async fn deep_bodies_are_refused_wherever_they_are_deep() {
    for path in ROUTES {
        for field in
            ["prompt", "messages", "stop", "logit_bias", "metadata", "response_format", "user", "no_such_field"]
        {
            for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
                for depth in [100, 127, 128, 1000, 200_000] {
                    let inner = if open == "[" { String::new() } else { "1".into() };
                    let value = format!("{}{inner}{}", open.repeat(depth), close.repeat(depth));
                    let body = format!("{{{}, \"max_tokens\": 1, \"{field}\": {value}}}", start(path));
                    let (status, answer) = raw(&shipped(), path, body).await;
                    let free = depth == 100 && ["metadata", "user", "no_such_field"].contains(&field);
                    let expected = if free { StatusCode::OK } else { StatusCode::BAD_REQUEST };
                    if depth != 127 {
                        assert_eq!(status, expected, "{path} {field} {depth} deep: {answer}");
                    }
                    assert!(status == StatusCode::OK || status == StatusCode::BAD_REQUEST);
                }
            }
        }
    }
}

/// Returns the JSON text of `count` fields, each after a comma.
fn many_keys(count: usize) -> String {
    (0..count).fold(String::new(), |keys, at| keys + &format!(", \"k{at}\": 0"))
}

#[tokio::test]
async fn wide_bodies_are_accepted_or_refused() {
    let keys = many_keys(300_000);
    let (status, answer) = raw(&shipped(), ROUTES[0], format!("{{\"prompt\": \"x\", \"max_tokens\": 1{keys}}}")).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    let keys = many_keys(1_000_000);
    let (status, _) = raw(&shipped(), ROUTES[0], format!("{{\"prompt\": \"x\", \"max_tokens\": 1{keys}}}")).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let list = vec!["1"; 1_500_000].join(",");
    for field in ["stop_token_ids", "stop", "prompt"] {
        let body = format!(
            "{{\"max_tokens\": 1, \"{field}\": [{list}]{}}}",
            if field == "prompt" { "" } else { ", \"prompt\": \"x\"" }
        );
        let (status, answer) = raw(&shipped(), ROUTES[0], body).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(field)), "{answer}");
    }
}

#[tokio::test]
async fn a_duplicate_field_is_named() {
    for (field, value) in [("prompt", "\"y\""), ("n", "1"), ("stop", "null"), ("temperature", "0")] {
        let body = format!("{{\"prompt\": \"x\", \"{field}\": {value}, \"{field}\": {value}}}");
        let (status, answer) = raw(&shipped(), ROUTES[0], body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(field), "{answer}");
    }
    let (status, answer) =
        raw(&shipped(), ROUTES[0], r#"{"prompt": "x", "max_tokens": 1, "user": "a", "user": "b"}"#.into()).await;
    assert_eq!((status, answer["error"].clone()), (StatusCode::OK, Value::Null));
}
