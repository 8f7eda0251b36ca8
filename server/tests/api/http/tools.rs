//! Tool calls: which tools are called, the form of the calls, the template's input, and invalid requests.

use crate::common::parrot::parrot;
use crate::common::{events, send, shipped, text, with};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

/// A template that writes its whole input.
const SHOWS_ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}\
    {% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.x }}{% endfor %}\
    {{ m.tool_call_id or '' }}]{% endfor %}";

fn chat(body: &Value) -> Request<Body> {
    let request = Request::post("/v1/chat/completions").header(header::CONTENT_TYPE, "application/json");
    request.body(Body::from(body.to_string())).unwrap()
}

async fn post(state: &AppState, body: &Value) -> (StatusCode, Value) {
    let response = send(state, chat(body)).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "required": ["x"], "additionalProperties": false,
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "note": {"enum": ["}\"{", "é🦀"]}}});
    json!({"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}})
}

fn asking(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    with(json!({"messages": messages, "max_tokens": 300, "tools": [tool("f"), tool("g")], "temperature": 0}), more)
}

/// Returns the first choice of a stream, combined as clients do, and the stream's chunks.
async fn streamed(state: &AppState, body: &Value) -> (Value, Vec<Value>) {
    let response = send(state, chat(&with(body.clone(), json!({"stream": true})))).await;
    assert_eq!(response.status(), StatusCode::OK);
    let stream = text(response).await;
    let mut data = events(&stream);
    assert_eq!(data.pop(), Some("[DONE]"));
    let chunks: Vec<Value> = data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect();
    let (mut content, mut calls, mut reason) = (Value::Null, Vec::<Value>::new(), Value::Null);
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        if let Some(more) = choice["delta"]["content"].as_str() {
            content = json!(content.as_str().unwrap_or_default().to_owned() + more);
        }
        for piece in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
            if index == calls.len() {
                assert!(piece["id"].as_str().unwrap().starts_with("call_") && piece["type"] == "function", "{piece}");
                calls.push(json!({"name": piece["function"]["name"], "arguments": ""}));
            } else {
                assert!(piece.get("id").is_none() && piece["function"].get("name").is_none(), "{piece}");
            }
            let more = piece["function"]["arguments"].as_str().unwrap();
            calls[index]["arguments"] = json!(calls[index]["arguments"].as_str().unwrap().to_owned() + more);
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    (json!({"content": content, "calls": calls, "reason": reason}), chunks)
}

/// Returns the first choice of a whole answer in the same form.
fn whole(answer: &Value) -> Value {
    let choice = &answer["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let calls: Vec<Value> = calls.into_iter().map(|call| call["function"].clone()).collect();
    json!({"content": choice["message"]["content"], "calls": calls, "reason": choice["finish_reason"]})
}

fn check_arguments(call: &Value) {
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!((0..=99).contains(&arguments["x"].as_i64().unwrap()), "{call}");
}

#[tokio::test]
async fn a_required_call_has_arguments_that_match_the_schema() {
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (choice, temperature) in
        [(json!("required"), 0.0), (json!("required"), 2.0), (named.clone(), 2.0), (named, 1.0)]
    {
        let body = asking(json!({"tool_choice": choice, "temperature": temperature, "seed": 5}));
        let (status, answer) = post(&shipped(), &body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let said = whole(&answer);
        assert_eq!((&said["content"], &said["reason"]), (&Value::Null, &json!("tool_calls")), "{answer}");
        assert_eq!(said["calls"].as_array().unwrap().len(), 1, "{answer}");
        let call = &said["calls"][0];
        assert!(call["name"] == "g" || (choice == "required" && call["name"] == "f"), "{answer}");
        check_arguments(call);
        let message = &answer["choices"][0]["message"]["tool_calls"][0];
        assert!(message["id"].as_str().unwrap().starts_with("call_") && message["type"] == "function", "{answer}");
        assert!(message.get("index").is_none(), "{answer}");
        let (stream, chunks) = streamed(&shipped(), &body).await;
        assert_eq!(stream, said, "{chunks:?}");
        assert!(chunks[0]["choices"][0]["delta"]["content"].is_null(), "{}", chunks[0]);
    }
}

/// Many tools have keywords that are not supported, and many clients do not ask for a strict schema.
#[tokio::test]
async fn of_a_schema_that_is_not_strict_the_supported_part_holds() {
    let called = |strict: &Value| {
        let mut tool = tool("f");
        let parameters = &mut tool["function"]["parameters"];
        parameters["properties"]["note"] = json!({"type": "string", "format": "password", "not": {"const": ""}});
        parameters["propertyNames"] = json!({"maxLength": 9});
        tool["function"]["strict"] = strict.clone();
        asking(json!({"tools": [tool], "tool_choice": "required"}))
    };
    for strict in [Value::Null, json!(false)] {
        let (status, answer) = post(&shipped(), &called(&strict)).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        let call = &whole(&answer)["calls"][0];
        // The note may be cut off, but what comes before it follows the schema.
        let x = call["arguments"].as_str().unwrap().strip_prefix("{\"x\": ").expect("x comes first");
        let x: u8 = x[..x.find([',', '}']).unwrap()].parse().unwrap();
        assert!(x <= 99, "{answer}");
    }
    let (status, answer) = post(&shipped(), &called(&json!(true))).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("tools")), "{answer}");
}

#[tokio::test]
async fn an_optional_call_is_recognised_by_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    let call = r#"{"name": "f", "arguments": {"x": 7, "note": "}\"{"}}"#;
    let called = json!({"content": null, "reason": "tool_calls",
        "calls": [{"name": "f", "arguments": r#"{"x": 7, "note": "}\"{"}"#}]});
    let said = |text: &str| json!({"content": text, "calls": [], "reason": "stop"});
    let table = [
        (call, called),
        ("Once there was a { in a text", said("Once there was a { in a text")),
        ("{\"na", said("{\"na")),
        ("{\"name\":\"f\"}", said("{\"name\":\"f\"}")),
        ("", said("")),
    ];
    for (wanted, expected) in table {
        let state = parrot(wanted, SHOWS_ALL, folder.path());
        for choice in [json!({}), json!({"tool_choice": "auto"})] {
            let (status, answer) = post(&state, &asking(choice.clone())).await;
            assert_eq!(status, StatusCode::OK, "{answer}");
            assert_eq!(whole(&answer), expected, "{wanted}");
            let (mut stream, _) = streamed(&state, &asking(choice)).await;
            if expected["content"].is_null() {
                assert_eq!(stream["content"], "", "the stream starts before the kind of answer is known");
                stream["content"] = Value::Null;
            }
            assert_eq!(stream, expected, "{wanted}");
        }
    }
}

#[tokio::test]
async fn arguments_are_streamed_as_they_are_generated() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot(r#"{"name": "f", "arguments": {"x": 7, "note": "é🦀"}}"#, SHOWS_ALL, folder.path());
    let (said, chunks) = streamed(&state, &asking(json!({"tool_choice": "required", "return_token_ids": true}))).await;
    assert_eq!(said["calls"][0]["arguments"], r#"{"x": 7, "note": "é🦀"}"#);
    let calls = |chunk: &&Value| !chunk["choices"][0]["delta"]["tool_calls"].is_null();
    assert!(chunks.iter().filter(calls).count() > 5, "{chunks:?}");
}

#[tokio::test]
async fn several_calls_are_made_if_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let two = "{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n{\"name\": \"g\", \"arguments\": {\"x\": 2}}";
    let state = parrot(two, SHOWS_ALL, folder.path());
    let calls = json!([{"name": "f", "arguments": "{\"x\": 1}"}, {"name": "g", "arguments": "{\"x\": 2}"}]);
    for choice in ["auto", "required"] {
        let body = asking(json!({"tool_choice": choice, "parallel_tool_calls": true}));
        assert_eq!(whole(&post(&state, &body).await.1)["calls"], calls);
        assert_eq!(streamed(&state, &body).await.0["calls"], calls);
        let body = asking(json!({"tool_choice": choice, "parallel_tool_calls": false}));
        assert_eq!(whole(&post(&state, &body).await.1)["calls"], json!([calls[0]]));
    }
}

#[tokio::test]
async fn with_a_schema_an_answer_is_a_call_or_json() {
    let folder = tempfile::tempdir().unwrap();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}});
    let named = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let call = r#"{"name": "f", "arguments": {"x": 7}}"#;
    for (wanted, format, json_text) in [
        (call, &named, "{"),
        (call, &json!({"type": "json_object"}), "{"),
        (r#"{"name": "f", "age": 7}"#, &named, r#"{"name": "f", "age": 7}"#),
        (r#"{"name": "f", "deep": [{}]}"#, &json!({"type": "json_object"}), r#"{"name": "f", "deep": [{}]}"#),
    ] {
        let state = parrot(wanted, SHOWS_ALL, folder.path());
        let format = json!({"response_format": format, "structured_outputs": {"disable_additional_properties": true}});
        let said = if wanted == call {
            json!({"content": null, "calls": [{"name": "f", "arguments": "{\"x\": 7}"}], "reason": "tool_calls"})
        } else {
            json!({"content": wanted, "calls": [], "reason": "stop"})
        };
        let body = asking(format.clone());
        assert_eq!(whole(&post(&state, &body).await.1), said);
        assert_eq!(streamed(&state, &body).await.0["calls"], said["calls"]);
        // `tool_choice` can force a call or forbid it.
        let forced = whole(&post(&state, &with(body.clone(), json!({"tool_choice": "required"}))).await.1);
        assert_eq!((&forced["content"], &forced["calls"][0]["name"]), (&Value::Null, &json!("f")), "{wanted}");
        let forbidden = whole(&post(&state, &with(body, json!({"tool_choice": "none"}))).await.1);
        assert!(forbidden["content"].as_str().unwrap().starts_with(json_text), "{forbidden}");
        assert_eq!(forbidden["calls"], json!([]));
    }
}

#[tokio::test]
async fn a_truncated_call_is_marked_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot(r#"{"name": "f", "arguments": {"x": 7, "note": "é🦀"}}"#, SHOWS_ALL, folder.path());
    let full = whole(&post(&state, &asking(json!({"tool_choice": "required"}))).await.1);
    for most in 1..20 {
        let (_, answer) = post(&state, &asking(json!({"tool_choice": "required", "max_tokens": most}))).await;
        let said = whole(&answer);
        if said["reason"] == "length" {
            let arguments = said["calls"][0]["arguments"].as_str().unwrap_or_default();
            assert!(full["calls"][0]["arguments"].as_str().unwrap().starts_with(arguments), "{answer}");
            assert_eq!(said["content"], Value::Null, "{answer}");
        }
    }
}

fn count(text: &str) -> usize {
    let tokenizer = tidegate_server::text::Tokenizer::load(&crate::common::checkpoint(), 4096, &[]).unwrap();
    tokenizer.encode_chat(text).unwrap().len()
}

#[tokio::test]
async fn a_truncated_call_can_be_sent_back_and_developer_means_system() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("ok", SHOWS_ALL, folder.path());
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 3"}});
    for (messages, shown) in [
        (json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": null}]), "[user:u][assistant:]"),
        (json!([{"role": "assistant", "content": null, "tool_calls": [call]}]), "[assistant:f=]"),
        (json!([{"role": "developer", "content": "d"}]), "[system:d]"),
    ] {
        let (status, answer) = post(&state, &asking(json!({"messages": messages, "tool_choice": "none"}))).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["usage"]["prompt_tokens"], count(shown), "{answer}");
    }
}

#[tokio::test]
async fn templates_receive_tools_calls_and_results() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("ok", SHOWS_ALL, folder.path());
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 3}"}});
    let messages = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "r"}]}]);
    let (status, answer) = post(&state, &asking(json!({"messages": messages, "tool_choice": "none"}))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["usage"]["prompt_tokens"], count("[user:u][assistant:f=3][tool:rcall_1]"), "{answer}");
    let (_, with_tools) = post(&state, &asking(json!({"messages": messages}))).await;
    assert!(with_tools["usage"]["prompt_tokens"].as_u64() > answer["usage"]["prompt_tokens"].as_u64(), "{with_tools}");
}

#[tokio::test]
async fn invalid_tools_are_refused_by_name() {
    let many: Vec<Value> = (0..129).map(|n| tool(&format!("f{n}"))).collect();
    let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let table = [
        ("tools", json!({"tools": {}}), "must be an array"),
        ("tools", json!({"tools": many}), "at most 128 tools, found 129"),
        ("tools", json!({"tools": [tool("f"), tool("f")]}), "\"f\" twice"),
        ("tools", json!({"tools": [{"type": "web_search"}]}), "tools[0].type must be function, found \"web_search\""),
        ("tools", json!({"tools": [{"type": "function"}]}), "tools[0].function must be an object"),
        ("tools", function(json!({})), "tools[0].function.name must be a string"),
        ("tools", function(json!({"name": "a b"})), "tools[0].function.name must be 1 to 64 letters"),
        ("tools", function(json!({"name": "a".repeat(65)})), "1 to 64 letters"),
        ("tools", function(json!({"name": "a", "strict": {}})), "tools[0].function.strict must be true or false"),
        ("tools", function(json!({"name": "a", "description": 1})), "function.description must be a string"),
        ("tools", function(json!({"name": "a", "parameters": []})), "parameters must be a JSON schema"),
        ("tools", function(json!({"name": "a", "parameters": {"type": "string"}})), "parameters.type must be object"),
        (
            "tools",
            function(json!({"name": "a", "strict": true, "parameters": {"properties": {"x": {"not": {}}}}})),
            "tools must be a valid and supported grammar: the parameters of a: Unimplemented keys: [\"not\"]",
        ),
        ("tool_choice", json!({"tool_choice": "always"}), "must be none, auto, required or a function"),
        ("tool_choice", json!({"tool_choice": {"type": "function", "function": {"name": "h"}}}), "found \"h\""),
        ("tool_choice", json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice.type must be function"),
        ("tool_choice", json!({"tools": [], "tool_choice": "required"}), "without tools"),
        ("parallel_tool_calls", json!({"parallel_tool_calls": "yes"}), "must be true or false, found \"yes\""),
        ("functions", json!({"functions": [{"name": "f"}]}), "functions must be absent"),
        ("function_call", json!({"function_call": "auto"}), "function_call must be absent"),
        (
            "guided_choice",
            json!({"guided_choice": ["a"]}),
            "guided_choice must be absent or JSON if tools may be called",
        ),
        (
            "response_format",
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}}),
            "must not allow JSON that begins as a call of the tool f does: {\"name\": \"f\", \"arguments\": …",
        ),
        ("messages", json!({"messages": [{"role": "user", "tool_calls": []}]}), "must all have content"),
    ];
    for (param, more, part) in table {
        let (status, answer) = post(&shipped(), &asking(more)).await;
        let error = &answer["error"];
        assert_eq!((status, error["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{part}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(part), "{part}: {error}");
    }
    let body = json!({"prompt": "x", "tools": [tool("f")]});
    let (status, answer) = crate::common::post(&shipped(), body).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("tools")), "{answer}");
    // Tools that may not be called have no effect.
    let free = json!({"tool_choice": "none", "response_format": {"type": "json_object"}, "max_tokens": 3});
    assert_eq!(post(&shipped(), &asking(free)).await.0, StatusCode::OK);
}
