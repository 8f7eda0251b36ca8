//! Constrained answers with the shipped checkpoint: they match their grammar, whole and streamed, alone and next to
//! unconstrained ones. Invalid grammars are refused under the name of the client's parameter.

use crate::common::{events, post, send, shipped, stream, text, with};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};

/// Returns whether a text matches the grammar.
type Follows<'a> = &'a dyn Fn(&str) -> bool;

fn chat(body: &Value) -> Request<Body> {
    let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

async fn post_chat(body: &Value) -> (StatusCode, Value) {
    let response = send(&shipped(), chat(body)).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

fn asking(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 300}), more)
}

fn person() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["é🦀", "b\"c"]}}}})
}

fn in_schema(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "person", "description": "d", "strict": true, "schema": schema}})
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    let fields: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["name", "age", "tags"], "{text}");
    assert!(value["name"].as_str().unwrap().chars().count() <= 20, "{text}");
    assert!((0..=130).contains(&value["age"].as_i64().unwrap()), "{text}");
    assert!(value["tags"].as_array().unwrap().iter().all(|tag| tag == "é🦀" || tag == "b\"c"), "{text}");
}

#[tokio::test]
async fn answers_match_the_schema_at_any_temperature() {
    for (seed, temperature) in [(1, 0.0), (2, 1.0), (3, 2.0), (4, 2.0)] {
        let body = asking(json!({"response_format": in_schema(&person()), "seed": seed, "temperature": temperature}));
        let (status, answer) = post_chat(&body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{answer}");
        check_person(choice["message"]["content"].as_str().unwrap());
    }
}

#[tokio::test]
async fn a_stream_contains_the_same_text() {
    let body = asking(json!({"response_format": in_schema(&person()), "seed": 7, "temperature": 2}));
    let (_, whole) = post_chat(&body).await;
    let response = send(&shipped(), chat(&with(body, json!({"stream": true})))).await;
    let stream = text(response).await;
    let chunks = events(&stream).into_iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let pieces: Vec<String> = chunks
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .filter(|piece| !piece.is_empty())
        .collect();
    assert!(pieces.len() > 3, "{pieces:?}");
    assert_eq!(pieces.concat(), whole["choices"][0]["message"]["content"]);
    check_person(&pieces.concat());
}

#[tokio::test]
async fn every_parameter_for_a_grammar_is_supported() {
    let choice = json!(["rot", "grün", "blue sky"]);
    let is_number = |text: &str| (2..=3).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_choice = |text: &str| choice.as_array().unwrap().iter().any(|choice| choice == text);
    let lark = "start: \"(\" start \")\" | \"x\"";
    // A bias for the token "x": without it the model may open parentheses forever.
    let ends = json!({"88": 12});
    let is_nested = |text: &str| text.trim_start_matches('(').trim_end_matches(')') == "x";
    let is_person = |text: &str| {
        check_person(text);
        true
    };
    let is_object = |text: &str| serde_json::from_str::<Value>(text).unwrap().is_object();
    let small = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let table: Vec<(Value, Follows)> = vec![
        (json!({"regex": "[0-9]{2,3}"}), &is_number),
        (json!({"guided_regex": "[0-9]{2,3}"}), &is_number),
        (json!({"structured_outputs": {"regex": "[0-9]{2,3}", "json": null}}), &is_number),
        (json!({"guided_choice": choice}), &is_choice),
        (json!({"structured_outputs": {"choice": choice}}), &is_choice),
        (json!({"grammar": lark, "logit_bias": ends}), &is_nested),
        (json!({"guided_grammar": lark, "logit_bias": ends}), &is_nested),
        (json!({"structured_outputs": {"grammar": lark}, "logit_bias": ends}), &is_nested),
        (json!({"guided_json": person()}), &is_person),
        (json!({"guided_json": person().to_string()}), &is_person),
        (json!({"structured_outputs": {"json": person()}}), &is_person),
        (json!({"response_format": in_schema(&person())}), &is_person),
        (json!({"response_format": in_schema(&small)}), &is_object),
        (json!({"response_format": {"type": "json_object", "schema": person(), "value": null}}), &is_person),
        (json!({"response_format": {"type": "json_object", "value": person().to_string()}}), &is_person),
        (json!({"json_schema": person()}), &is_person),
    ];
    for (asked, follows) in table {
        let body = with(json!({"prompt": "Once", "max_tokens": 300, "seed": 3, "temperature": 1}), asked.clone());
        let (status, answer) = post(&shipped(), body).await;
        assert_eq!(status, StatusCode::OK, "{asked}: {answer}");
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{asked}: {answer}");
        assert!(follows(choice["text"].as_str().unwrap()), "{asked}: {answer}");
    }
}

#[tokio::test]
async fn any_json_object_is_generated_and_may_be_truncated() {
    for format in
        [json!({"response_format": {"type": "json_object"}}), json!({"structured_outputs": {"json_object": true}})]
    {
        let body = with(json!({"prompt": "Once", "max_tokens": 20, "seed": 3}), format);
        let (status, answer) = post(&shipped(), body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().unwrap();
        assert!(text.starts_with('{'), "{answer}");
        if choice["finish_reason"] == "stop" {
            assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
        }
    }
}

#[tokio::test]
async fn constrained_and_unconstrained_texts_run_together_with_the_same_results_as_alone() {
    let free = json!({"prompt": "Once upon a time", "max_tokens": 30, "seed": 5, "temperature": 1});
    let bound = with(free.clone(), json!({"response_format": in_schema(&person()), "max_tokens": 300}));
    let alone = (post(&shipped(), free.clone()).await.1, post(&shipped(), bound.clone()).await.1);
    let several =
        |body: &Value| with(body.clone(), json!({"prompt": vec!["Once upon a time"; 3], "return_token_ids": true}));
    let (free, bound) = (several(&free), several(&bound));
    let state = shipped();
    let (free, bound) = tokio::join!(
        stream(&state, with(free, json!({"stream": true}))),
        stream(&state, with(bound, json!({"stream": true})))
    );
    for text in free.0 {
        assert_eq!(text.0, alone.0["choices"][0]["text"]);
    }
    for text in bound.0 {
        assert_eq!(text.0, alone.1["choices"][0]["text"]);
        check_person(&text.0);
    }
}

#[tokio::test]
async fn all_texts_of_a_request_follow_the_grammar() {
    let body = asking(json!({"response_format": in_schema(&person()), "n": 3, "seed": 1, "temperature": 1.5}));
    let (status, answer) = post_chat(&body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    for choice in answer["choices"].as_array().unwrap() {
        check_person(choice["message"]["content"].as_str().unwrap());
    }
}

fn nested(count: usize) -> String {
    format!("{}a{}", "(".repeat(count), ")".repeat(count))
}

#[tokio::test]
async fn an_invalid_grammar_is_refused_under_its_parameter() {
    let table = [
        ("response_format", json!("json"), "must be an object"),
        ("response_format", json!({}), "response_format.type must be text, json_object or json_schema, found null"),
        ("response_format", json!({"type": "structural_tag"}), "found \"structural_tag\""),
        ("response_format", json!({"type": "json_schema"}), "name must be a string"),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {}}}), "json_schema.name"),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}),
            "1 to 64 letters",
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "a"}}),
            "json_schema.schema must be given",
        ),
        (
            "response_format",
            in_schema(&json!({"type": "strange"})),
            "response_format.json_schema.schema must be a valid and supported grammar",
        ),
        ("response_format", in_schema(&json!({"uniqueItems": true, "type": "array"})), "uniqueItems"),
        ("response_format", in_schema(&json!({"$ref": "https://127.0.0.1:9/x"})), "another document"),
        ("response_format", in_schema(&json!([])), "must be a valid and supported grammar"),
        ("response_format", json!({"type": "json_object", "shape": {}}), "response_format.shape must be absent"),
        ("response_format", json!({"type": "json_object", "schema": {}, "value": {}}), "value must be absent beside"),
        (
            "response_format",
            json!({"type": "json_object", "schema": 7}),
            "response_format.schema must be a valid and supported grammar",
        ),
        ("response_format", json!({"type": "text", "schema": {}}), "response_format.schema must be absent"),
        (
            "response_format",
            json!({"type": "json_schema", "schema": {}, "json_schema": {"name": "a", "schema": {}}}),
            "response_format.schema must be absent",
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "pattern": "x"}}),
            "response_format.json_schema.pattern must be absent",
        ),
        ("json_schema", json!("{"), "must be a JSON schema, or the text of one"),
        ("regex", json!(1), "regex must be a string"),
        ("regex", json!(nested(60_000)), "must be at most 16384 bytes long"),
        ("regex", json!(nested(1000)), "must be nested at most 100 levels deep"),
        ("regex", json!("(a"), "regex must be a valid and supported grammar"),
        ("grammar", json!("start: <[0]>"), "must not have tokens by name"),
        ("grammar", json!(format!("start: {}", nested(30_000).replace('a', "\"a\""))), "must be nested at most"),
        ("guided_json", json!("{"), "must be a JSON schema, or the text of one"),
        ("guided_choice", json!([]), "must hold from 1 to 1024 texts"),
        ("guided_choice", json!("a"), "must be an array of strings"),
        ("structured_outputs", json!({}), "must have one of"),
        ("structured_outputs", json!({"regex": "a", "choice": ["a"]}), "must have one of"),
        ("structured_outputs", json!({"disable_additional_properties": 1}), "must be true or false, found 1"),
        ("structured_outputs", json!({"structural_tag": "a"}), "structured_outputs.structural_tag must be absent"),
        ("chat_template", json!("{{ 1 }}"), "chat_template is not supported"),
        ("guided_whitespace_pattern", json!(" "), "guided_whitespace_pattern is not supported"),
    ];
    for (param, value, part) in table {
        let asked = json!({param: value});
        let answers =
            [post(&shipped(), with(json!({"prompt": "x"}), asked.clone())).await, post_chat(&asking(asked)).await];
        for (status, answer) in answers {
            let error = &answer["error"];
            assert_eq!((status, error["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{answer}");
            assert!(error["message"].as_str().unwrap().contains(part), "{part}: {error}");
        }
    }
}

#[tokio::test]
async fn a_deep_schema_is_refused_like_any_deep_body() {
    let deep = |levels: usize| "{\"items\":".repeat(levels) + "true" + &"}".repeat(levels);
    for levels in [101, 110, 3000] {
        let body = format!("{{\"prompt\": \"x\", \"guided_json\": {}}}", deep(levels));
        let (status, answer) = {
            let response = send(&shipped(), crate::common::completion(body)).await;
            (response.status(), text(response).await)
        };
        assert_eq!(status, StatusCode::BAD_REQUEST, "{levels}: {answer}");
    }
}

#[tokio::test]
async fn an_answer_follows_at_most_one_grammar() {
    for (first, second) in [("regex", "grammar"), ("regex", "guided_regex"), ("response_format", "guided_json")] {
        let value = |name: &str| match name {
            "response_format" => json!({"type": "json_object"}),
            "guided_json" => json!({}),
            _ => json!("start: \"a\""),
        };
        let (status, answer) =
            post(&shipped(), json!({"prompt": "x", first: value(first), second: value(second)})).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(second)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(first), "{answer}");
    }
    // A parameter that requests nothing does not count as a second grammar.
    let body = json!({"prompt": "x", "regex": "[ab]", "response_format": {"type": "text"}, "grammar": null});
    let (status, answer) = post(&shipped(), body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert!(["a", "b"].contains(&answer["choices"][0]["text"].as_str().unwrap()), "{answer}");
}

#[tokio::test]
async fn a_response_follows_its_format_and_states_it() {
    let app = crate::common::sessions::app().await;
    let format = json!({"type": "json_schema", "name": "person", "schema": person(), "strict": true});
    let more = json!({"text": {"format": format}, "max_output_tokens": 300, "temperature": 2, "seed": 3});
    let response =
        crate::common::responses::respond(&app, crate::common::responses::asking("Once upon a time", more.clone()))
            .await;
    assert_eq!(response["status"], "completed", "{response}");
    assert_eq!(response["text"]["format"], format, "{response}");
    check_person(crate::common::responses::said(&response));
    for (param, more) in [
        ("text", json!({"text": {"format": {"type": "json_schema", "schema": {}}}})),
        ("text", with(more, json!({"regex": "a"}))),
    ] {
        let answer = app.post(crate::common::responses::PATH, crate::common::responses::asking("x", more)).await;
        assert_eq!((answer.status, answer.param().as_str()), (StatusCode::BAD_REQUEST, param), "{}", answer.text());
    }
}
