//! `/v1/messages` as Anthropic's clients use it.

use crate::common::fake::Fake;
use crate::common::{scripted, send, shipped, text, with};
use axum::body::Body;
use axum::http::{Request, Response, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

const PATH: &str = "/v1/messages";

async fn ask(state: &AppState, path: &str, body: &Value) -> Response<Body> {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let request = request.header("anthropic-version", "2023-06-01").header("x-request-id", "abc");
    send(state, request.body(Body::from(body.to_string())).unwrap()).await
}

async fn answered(path: &str, body: &Value) -> Value {
    let response = ask(&shipped(), path, body).await;
    let (status, answer) = (response.status(), text(response).await);
    assert_eq!(status, StatusCode::OK, "{body}: {answer}");
    serde_json::from_str(&answer).unwrap()
}

/// Returns a greedy request, so that the text is the same however it is requested.
#[expect(clippy::needless_pass_by_value, reason = "it is made where it is called")]
fn asking(messages: Value, more: Value) -> Value {
    let body = json!({"model": "tidegate-tiny", "max_tokens": 12, "temperature": 0, "messages": messages});
    with(body, more)
}

fn user(content: impl Into<Value>) -> Value {
    json!([{"role": "user", "content": content.into()}])
}

/// Returns the events of a stream; the name before each event and the one inside it must agree.
fn events(stream: &str) -> Vec<Value> {
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    };
    stream.split_terminator("\n\n").map(event).collect()
}

fn weather() -> Value {
    let schema = json!({"type": "object", "properties": {"hot": {"type": "boolean"}}, "required": ["hot"],
        "additionalProperties": false});
    json!({"name": "weather", "description": "Tells it.", "input_schema": schema})
}

async fn chat(messages: Value) -> Value {
    let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
    answered("/v1/chat/completions", &body).await
}

#[tokio::test]
async fn a_message_equals_the_answer_of_chat() {
    let body = asking(
        user("Tell me of a fox."),
        json!({"system": [{"type": "text", "text": "Be brief."}],
        "metadata": {"user_id": "u"}, "tools": [], "thinking": {"type": "disabled"}}),
    );
    let message = answered(PATH, &body).await;
    let same = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me of a fox."}]);
    let chat = chat(same).await;
    let said = &chat["choices"][0]["message"]["content"];
    assert_eq!(message["content"], json!([{"type": "text", "text": said}]));
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["model"], "tidegate-tiny");
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    let usage = &message["usage"];
    let tokens = |name: &str| usage[name].as_u64().unwrap();
    assert_eq!(tokens("input_tokens") + tokens("cache_read_input_tokens"), chat["usage"]["prompt_tokens"]);
    assert_eq!((tokens("output_tokens"), tokens("cache_creation_input_tokens")), (12, 0));
    let counted = answered("/v1/messages/count_tokens", &body).await;
    assert_eq!(counted, json!({"input_tokens": chat["usage"]["prompt_tokens"]}));
    // The answer's format is checked too: it decides whether there is room for reasoning, which changes the prompt.
    let wrong = with(body, json!({"output_format": {"type": "json_schema", "schema": [null]}}));
    let refused = ask(&shipped(), "/v1/messages/count_tokens", &wrong).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert!(text(refused).await.contains("output_format.schema must be an object"));
}

#[tokio::test]
async fn a_last_message_of_the_assistant_is_continued() {
    let messages = json!([{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "Once upon"}]);
    let message = answered(PATH, &asking(messages, json!({}))).await;
    let body = json!({"prompt": "Tell me.\n\nOnce upon", "max_tokens": 12, "temperature": 0});
    let completion = answered("/v1/completions", &body).await;
    assert_eq!(message["content"][0]["text"], completion["choices"][0]["text"]);
}

#[tokio::test]
async fn thinking_in_a_history_is_left_out() {
    let thinking = json!({"type": "thinking", "thinking": "What about?", "signature": "x"});
    let hidden = json!({"type": "redacted_thinking", "data": "x"});
    let history = |answer: Value| {
        let messages = json!([{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": answer},
            {"role": "user", "content": "More."}]);
        asking(messages, json!({}))
    };
    let said = json!({"type": "text", "text": "A fox"});
    let message = answered(PATH, &history(json!([thinking, hidden, said]))).await;
    assert_eq!(message["content"], answered(PATH, &history(json!("A fox"))).await["content"]);
    let asked = ask(&shipped(), PATH, &asking(user(json!([thinking])), json!({}))).await;
    assert_eq!(asked.status(), StatusCode::BAD_REQUEST, "a user does not think");
}

#[tokio::test]
async fn a_stream_contains_the_same_in_named_events() {
    let whole = answered(PATH, &asking(user("The king"), json!({}))).await;
    let response = ask(&shipped(), PATH, &asking(user("The king"), json!({"stream": true}))).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
    assert_eq!(response.headers()["request-id"], "abc");
    let events = events(&text(response).await);
    let [start, block, ping, deltas @ .., block_stop, message_delta, stop] = events.as_slice() else {
        panic!("{events:?}")
    };
    let message = &start["message"];
    assert_eq!(start["type"], "message_start");
    assert_eq!((&message["content"], &message["stop_reason"]), (&json!([]), &Value::Null));
    assert_eq!(message["usage"]["output_tokens"], 0);
    let block_start = json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}});
    assert_eq!((block, ping), (&block_start, &json!({"type": "ping"})));
    assert!(deltas.len() > 4, "the text came in {} pieces", deltas.len());
    let piece = |event: &Value| {
        assert_eq!((&event["type"], &event["index"]), (&json!("content_block_delta"), &json!(0)));
        assert_eq!(event["delta"]["type"], "text_delta");
        event["delta"]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(deltas.iter().map(piece).collect::<String>(), whole["content"][0]["text"].as_str().unwrap());
    assert_eq!(block_stop, &json!({"type": "content_block_stop", "index": 0}));
    assert_eq!(message_delta["type"], "message_delta");
    assert_eq!(message_delta["delta"], json!({"stop_reason": "max_tokens", "stop_sequence": null}));
    assert_eq!(message_delta["usage"]["output_tokens"], 12);
    assert_eq!(stop, &json!({"type": "message_stop"}));
}

#[tokio::test]
async fn an_end_is_named() {
    let whole = answered(PATH, &asking(user("The king"), json!({}))).await;
    let said = whole["content"][0]["text"].as_str().unwrap();
    let stop = said.split_whitespace().nth(2).unwrap();
    let stopped = answered(PATH, &asking(user("The king"), json!({"stop_sequences": ["zzz", stop]}))).await;
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert_eq!(stopped["content"][0]["text"], said.split_once(stop).unwrap().0);
}

#[tokio::test]
async fn a_tool_call_is_a_block_whose_input_matches_the_schema() {
    let tools = json!({"tools": [weather()], "tool_choice": {"type": "any"}, "max_tokens": 100});
    let whole = answered(PATH, &asking(user("Is it hot?"), tools.clone())).await;
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let [call] = whole["content"].as_array().unwrap().as_slice() else { panic!("{whole}") };
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")));
    assert!(call["input"]["hot"].is_boolean() && !call["id"].as_str().unwrap().is_empty(), "{call}");
    let response = ask(&shipped(), PATH, &asking(user("Is it hot?"), with(tools, json!({"stream": true})))).await;
    let events = events(&text(response).await);
    let start = events.iter().find(|event| event["type"] == "content_block_start").unwrap();
    assert_eq!((&start["content_block"]["name"], &start["content_block"]["input"]), (&json!("weather"), &json!({})));
    let pieces = events.iter().filter(|event| event["delta"]["type"] == "input_json_delta");
    let input: String = pieces.map(|event| event["delta"]["partial_json"].as_str().unwrap()).collect();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), call["input"], "greedy sampling gives the same input");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn an_answer_follows_the_schema_that_is_asked_for() {
    let schema = weather()["input_schema"].clone();
    let format = json!({"type": "json_schema", "schema": schema});
    let hot = |message: &Value| {
        let said: Value = serde_json::from_str(message["content"][0]["text"].as_str().unwrap()).unwrap();
        assert_eq!(said.as_object().unwrap().len(), 1, "{said}");
        said["hot"].as_bool().unwrap()
    };
    let config = json!({"output_config": {"format": format, "effort": null}, "max_tokens": 100});
    let said = hot(&answered(PATH, &asking(user("Is it hot?"), config.clone())).await);
    let older = json!({"output_format": format, "max_tokens": 100});
    assert_eq!(hot(&answered(PATH, &asking(user("Is it hot?"), older)).await), said);
    let nothing = json!({"output_config": {}, "output_format": null});
    let plain = answered(PATH, &asking(user("Is it hot?"), json!({}))).await;
    assert_eq!(answered(PATH, &asking(user("Is it hot?"), nothing)).await["content"], plain["content"]);

    let called = json!({"tools": [weather()], "tool_choice": {"type": "any"}});
    let called = answered(PATH, &asking(user("Is it hot?"), with(config.clone(), called))).await;
    assert_eq!(called["content"][0]["type"], "tool_use", "a call that is forced comes before the schema");
    let answer = json!({"tools": [weather()], "tool_choice": {"type": "none"}});
    hot(&answered(PATH, &asking(user("Is it hot?"), with(config, answer))).await);
}

#[tokio::test]
async fn tool_calls_and_results_are_read_like_those_of_chat() {
    let messages = json!([
        {"role": "user", "content": "Is it hot?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"hot": true}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Yes."}]},
            {"type": "text", "text": "So?"}]},
    ]);
    let message =
        answered(PATH, &asking(messages, json!({"tools": [weather()], "tool_choice": {"type": "none"}}))).await;
    let call = json!({"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{\"hot\":true}"}});
    let same = json!([
        {"role": "user", "content": "Is it hot?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Yes."},
        {"role": "user", "content": "So?"},
    ]);
    let chat = chat(same).await;
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
}

#[tokio::test]
async fn invalid_requests_are_refused_in_the_formats_own_shape() {
    let one = || user("x");
    for (part, body) in [
        ("max_tokens", json!({"model": "tidegate-tiny", "messages": one()})),
        ("max_tokens", asking(one(), json!({"max_tokens": 0}))),
        ("max_tokens", asking(one(), json!({"max_tokens": -1}))),
        ("max_tokens", asking(one(), json!({"max_tokens": 18_446_744_073_709_551_615_u64}))),
        ("model", json!({"messages": one(), "max_tokens": 1})),
        ("messages", asking(json!([]), json!({}))),
        ("messages", asking(json!("x"), json!({}))),
        ("messages", asking(json!([{"role": "user"}]), json!({}))),
        ("messages", asking(json!([{"role": "system", "content": "x"}]), json!({}))),
        ("messages", asking(json!([{"role": "assistant", "content": "x"}]), json!({}))),
        ("messages", asking(user(json!([{"type": "image", "source": {}}])), json!({}))),
        ("system", asking(one(), json!({"system": 1}))),
        ("temperature", asking(one(), json!({"temperature": 1.5}))),
        ("temperature", asking(one(), json!({"temperature": -0.1}))),
        ("top_p", asking(one(), json!({"top_p": 2}))),
        ("top_k", asking(one(), json!({"top_k": -1}))),
        ("stop_sequences", asking(one(), json!({"stop_sequences": [""]}))),
        ("stop_sequences", asking(one(), json!({"stop_sequences": "x"}))),
        ("stream", asking(one(), json!({"stream": 1}))),
        ("thinking", asking(one(), json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}))),
        ("tools", asking(one(), json!({"tools": [{"name": "f"}]}))),
        ("tools", asking(one(), json!({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}))),
        ("tools", asking(one(), json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}))),
        ("tool_choice", asking(one(), json!({"tools": [weather()], "tool_choice": {"type": "tool", "name": "x"}}))),
        ("tool_choice", asking(one(), json!({"tools": [weather()], "tool_choice": {"type": "some"}}))),
        ("messages", asking(json!([{"role": "user", "content": [{"type": "tool_use", "name": "x"}]}]), json!({}))),
        ("mcp_servers", asking(one(), json!({"mcp_servers": [{}]}))),
        ("output_config", asking(one(), json!({"output_config": "json"}))),
        ("output_config.effort", asking(one(), json!({"output_config": {"effort": "high"}}))),
        ("output_config.format.type", asking(one(), json!({"output_config": {"format": {"type": "text"}}}))),
        ("output_config.format.schema", asking(one(), json!({"output_config": {"format": {"type": "json_schema"}}}))),
        (
            "output_config.format.schema",
            asking(one(), json!({"output_config": {"format": {"type": "json_schema", "schema": {"type": "fox"}}}})),
        ),
        (
            "output_format.name",
            asking(one(), json!({"output_format": {"type": "json_schema", "schema": {}, "name": "fox"}})),
        ),
        (
            "output_format",
            asking(
                one(),
                json!({"output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
            ),
        ),
    ] {
        let response = ask(&shipped(), PATH, &body).await;
        assert_eq!(response.headers()["request-id"], "abc");
        let (status, answer) = (response.status(), text(response).await);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let error = &answer["error"];
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {answer}");
        assert_eq!((&answer["type"], &answer["request_id"]), (&json!("error"), &json!("abc")));
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(part), "{body}: {answer}");
    }
}

#[tokio::test]
async fn other_errors_have_the_formats_types_too() {
    let read = |response: Response<Body>| async {
        let status = response.status();
        let answer: Value = serde_json::from_str(&text(response).await).unwrap();
        (status, answer["error"]["type"].as_str().unwrap().to_owned())
    };
    let other = ask(&shipped(), PATH, &asking(user("x"), json!({"model": "claude-x"}))).await;
    assert_eq!(read(other).await, (StatusCode::NOT_FOUND, "not_found_error".into()));
    let wrong_method = send(&shipped(), crate::common::get(PATH)).await;
    assert_eq!(wrong_method.headers()[header::ALLOW], "POST");
    assert_eq!(read(wrong_method).await, (StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error".into()));
    let (state, ..) = scripted(Fake::new(1), 1);
    let long = ask(&state, PATH, &asking(user("x".repeat(10_001)), json!({}))).await;
    assert_eq!(read(long).await, (StatusCode::PAYLOAD_TOO_LARGE, "request_too_large".into()));
    let elsewhere = send(&shipped(), crate::common::get("/v1/nothing")).await;
    assert!(text(elsewhere).await.starts_with(r#"{"error":{"message""#), "OpenAI's shape stays elsewhere");
}
