//! Tools at `/v1/responses`: calls in whole and streamed responses, their outputs, JSON instead of calls, and invalid
//! requests.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;
use tidegate_server::session::{Codec, Location, Store, StoreOptions};
use tidegate_server::text::Tokenizer;

use crate::common::parrot::parrot;
use crate::common::responses::{PATH, asking, events, names};
use crate::common::{checkpoint, codec, get, send, text, with};

/// A template that writes its whole input.
const SHOWS_ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.content }}\
    {% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.x }}{% endfor %}\
    {{ m.tool_call_id or '' }}]{% endfor %}";

const CALL: &str = r#"{"name": "f", "arguments": {"x": 7, "note": "é🦀"}}"#;

/// Returns a server that always answers `answer`, with sessions in memory.
async fn answering(answer: &str) -> (AppState, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot(answer, SHOWS_ALL, folder.path());
    let codec = Arc::new(Codec { vocab_size: 4096, ..codec() });
    state.set_store(Store::open(StoreOptions::new(Location::Memory), codec).await.unwrap());
    (state, folder)
}

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "required": ["x"],
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "note": {"enum": ["é🦀"]}}});
    json!({"type": "function", "name": name, "description": "d", "parameters": parameters, "strict": true})
}

fn body(more: Value) -> Value {
    asking("Once", with(json!({"tools": [tool("f"), tool("g")], "max_output_tokens": 300}), more))
}

async fn post(state: &AppState, body: &Value) -> (StatusCode, String) {
    let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
    let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
    (response.status(), text(response).await)
}

async fn whole(state: &AppState, body: &Value) -> Value {
    let (status, answer) = post(state, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    serde_json::from_str(&answer).unwrap()
}

async fn streamed(state: &AppState, body: &Value) -> Vec<Value> {
    let (status, answer) = post(state, &with(body.clone(), json!({"stream": true}))).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    events(&answer)
}

/// Returns the name and arguments of each call, and the type and text of each other item.
fn output(response: &Value) -> Vec<(String, String)> {
    let items = response["output"].as_array().unwrap().iter();
    let item = |item: &Value| match item["type"].as_str().unwrap() {
        "function_call" => {
            assert!(item["id"].as_str().unwrap().starts_with("fc_"), "{item}");
            assert!(item["call_id"].as_str().unwrap().starts_with("call_"), "{item}");
            (item["name"].as_str().unwrap().to_owned(), item["arguments"].as_str().unwrap().to_owned())
        }
        kind => (kind.to_owned(), item["content"][0]["text"].as_str().unwrap().to_owned()),
    };
    items.map(item).collect()
}

fn pair(kind: &str, text: &str) -> (String, String) {
    (kind.to_owned(), text.to_owned())
}

fn count(text: &str) -> u64 {
    let tokenizer = Tokenizer::load(&checkpoint(), 4096, &[]).unwrap();
    tokenizer.encode_more(text).unwrap().len() as u64
}

#[tokio::test]
async fn a_call_is_an_item_and_its_arguments_are_streamed() {
    let (state, _folder) = answering(CALL).await;
    for choice in [json!("auto"), json!("required"), json!({"type": "function", "name": "f"})] {
        let body = body(json!({"tool_choice": choice}));
        let response = whole(&state, &body).await;
        assert_eq!(output(&response), [pair("f", r#"{"x": 7, "note": "é🦀"}"#)]);
        let item = &response["output"][0];
        assert_eq!((&item["status"], &response["status"]), (&json!("completed"), &json!("completed")));
        assert_eq!((&response["tools"], &response["tool_choice"]), (&json!([tool("f"), tool("g")]), &choice));
        assert_eq!(response["parallel_tool_calls"], true);
        let stored = send(&state, get(&crate::common::responses::path(&response))).await;
        assert_eq!(serde_json::from_str::<Value>(&text(stored).await).unwrap(), response);

        let events = streamed(&state, &body).await;
        let order = [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ];
        assert_eq!(names(&events), order, "{choice}");
        let [_, _, added, deltas @ .., done, item, last] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!((&added["item"]["status"], &added["item"]["arguments"]), (&json!("in_progress"), &json!("")));
        assert_eq!(added["item"]["name"], "f");
        // Text that the schema forces comes in one delta, so there are few.
        assert!(deltas.len() > 3, "{deltas:?}");
        let joined: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!((done["arguments"].as_str(), &done["name"]), (Some(joined.as_str()), &json!("f")));
        for event in deltas.iter().chain([done]) {
            assert_eq!((&event["item_id"], &event["output_index"]), (&added["item"]["id"], &json!(0)));
        }
        assert_eq!(item["item"], last["response"]["output"][0]);
        assert_eq!(output(&last["response"]), output(&response));
    }
}

#[tokio::test]
async fn several_calls_are_items_unless_only_one_is_allowed() {
    let second = r#"{"name": "g", "arguments": {"x": 2}}"#;
    let (state, _folder) = answering(&format!("{CALL}\n{second}")).await;
    let calls = [pair("f", r#"{"x": 7, "note": "é🦀"}"#), pair("g", r#"{"x": 2}"#)];
    assert_eq!(output(&whole(&state, &body(json!({}))).await), calls);
    let events = streamed(&state, &body(json!({}))).await;
    assert_eq!(output(&events.last().unwrap()["response"]), calls);
    let indices: Vec<u64> = events.iter().filter_map(|event| event["output_index"].as_u64()).collect();
    assert!(indices.is_sorted() && indices.last() == Some(&1), "{indices:?}");
    let dones = events.iter().filter(|event| event["type"] == "response.output_item.done");
    assert!(dones.map(|event| &event["item"]["status"]).all(|status| status == "completed"));
    assert_eq!(output(&whole(&state, &body(json!({"parallel_tool_calls": false}))).await), calls[..1]);
}

#[tokio::test]
async fn an_answer_without_a_call_is_a_message_as_without_tools() {
    let (state, _folder) = answering("{\"name\" is a word").await;
    let said = [pair("message", "{\"name\" is a word")];
    assert_eq!(output(&whole(&state, &body(json!({}))).await), said);
    let with_tools = streamed(&state, &body(json!({}))).await;
    let without = streamed(&state, &asking("Once", json!({"max_output_tokens": 300}))).await;
    assert_eq!(names(&with_tools), names(&without));
    assert_eq!(output(&with_tools.last().unwrap()["response"]), said);
    // Tools that may not be called are not shown to the model.
    let none = whole(&state, &body(json!({"tool_choice": "none"}))).await;
    assert_eq!(output(&none), said);
    assert_eq!(none["usage"]["input_tokens"], without.last().unwrap()["response"]["usage"]["input_tokens"]);
}

#[tokio::test]
async fn a_call_that_is_cut_off_is_incomplete() {
    let (state, _folder) = answering(CALL).await;
    let (mut begun, mut named) = (0, 0);
    for most in 1..40 {
        let body = body(json!({"tool_choice": "required", "max_output_tokens": most}));
        let response = whole(&state, &body).await;
        let events = streamed(&state, &body).await;
        assert_eq!(output(&events.last().unwrap()["response"]), output(&response));
        if response["status"] == "completed" {
            continue;
        }
        begun += 1;
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
        if let Some(item) = response["output"].get(0) {
            named += 1;
            let arguments = item["arguments"].as_str().unwrap();
            let complete = serde_json::from_str::<Value>(arguments).is_ok();
            assert!(r#"{"x": 7, "note": "é🦀"}"#.starts_with(arguments), "{item}");
            assert!(item["status"] == "incomplete" || complete, "{item}");
        }
    }
    assert!(begun > named && named > 2, "{begun} {named}");
}

#[tokio::test]
async fn calls_and_outputs_in_the_input_reach_the_template_as_in_chat() {
    let (state, _folder) = answering("ok").await;
    let call = |id: &str, x: u64| {
        let arguments = format!("{{\"x\": {x}}}");
        json!({"type": "function_call", "id": "fc_1", "call_id": id, "name": "f", "arguments": arguments, "status": "completed"})
    };
    let parts = json!([{"type": "input_text", "text": "r"}]);
    let input = json!([{"role": "user", "content": "u"}, call("c1", 3), call("c2", 4),
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "function_call_output", "call_id": "c2", "output": parts}]);
    let response = whole(&state, &asking(input, json!({}))).await;
    let shown = "[user:u][assistant:f=3f=4][tool:rc1][tool:rc2]";
    assert_eq!(response["usage"]["input_tokens"], count(shown) + 1, "with the token that begins a text");
}

#[tokio::test]
async fn a_response_that_calls_is_continued_by_the_output_alone() {
    let (state, _folder) = answering(CALL).await;
    let first = whole(&state, &body(json!({}))).await;
    let call_id = first["output"][0]["call_id"].as_str().unwrap();
    let output = |text: &str| json!([{"type": "function_call_output", "call_id": call_id, "output": text}]);
    let more = |text: &str| json!({"input": output(text), "previous_response_id": first["id"], "tools": []});
    let second = whole(&state, &body(more("r"))).await;
    let before = first["usage"]["total_tokens"].as_u64().unwrap();
    let added = second["usage"]["input_tokens"].as_u64().unwrap() - before;
    // The token that ended the first response is not part of the conversation.
    assert_eq!(added + 1, count(&format!("][tool:r{call_id}]")), "{second}");
    assert_eq!(second["previous_response_id"], first["id"]);
    assert_eq!(second["output"][0]["type"], "message");
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_calls() {
    let (state, _folder) = answering(CALL).await;
    for stream in [false, true] {
        let ask = || async {
            let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
            let request = request.header("idempotency-key", format!("key{stream}"));
            let body = body(json!({"stream": stream, "tool_choice": "required"})).to_string();
            text(send(&state, request.body(Body::from(body)).unwrap()).await).await
        };
        let (first, again) = (ask().await, ask().await);
        if !stream {
            assert_eq!(first, again);
            continue;
        }
        let (first, again) = (events(&first), events(&again));
        assert_eq!(names(&first), names(&again));
        assert_eq!(first.last().unwrap()["response"], again.last().unwrap()["response"]);
    }
}

#[tokio::test]
async fn an_answer_is_a_call_or_json_by_the_schema() {
    let schema = json!({"type": "object", "required": ["name", "age"],
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}});
    let format = json!({"text": {"format": {"type": "json_schema", "name": "person", "schema": schema}}});
    let json_text = r#"{"name": "f", "age": 7}"#;
    for (wanted, said) in [(CALL, pair("f", r#"{"x": 7, "note": "é🦀"}"#)), (json_text, pair("message", json_text))]
    {
        let (state, _folder) = answering(wanted).await;
        let body = body(format.clone());
        assert_eq!(output(&whole(&state, &body).await), std::slice::from_ref(&said));
        assert_eq!(output(&streamed(&state, &body).await.last().unwrap()["response"]), [said]);
        let forced = whole(&state, &with(body.clone(), json!({"tool_choice": "required"}))).await;
        assert_eq!(forced["output"][0]["type"], "function_call", "{forced}");
        let none = whole(&state, &with(body, json!({"tool_choice": "none"}))).await;
        assert_eq!(none["output"][0]["type"], "message", "{none}");
    }
}

#[tokio::test]
async fn invalid_tools_and_items_are_refused_by_name() {
    let (state, _folder) = answering("ok").await;
    let named = |name: &str| json!({"tool_choice": {"type": "function", "name": name}});
    let item = |item: Value| json!({"input": [item]});
    let table = [
        ("tools", json!({"tools": {}}), "tools must be an array"),
        ("tools", json!({"tools": [{"type": "web_search"}]}), "tools[0].type must be function, found \"web_search\""),
        ("tools", json!({"tools": [{"type": "file_search"}]}), "found \"file_search\""),
        ("tools", json!({"tools": [{"type": "mcp", "server_label": "x"}]}), "found \"mcp\""),
        ("tools", json!({"tools": [{"name": "f"}]}), "tools[0].type must be function, found null"),
        ("tools", json!({"tools": [{"type": "function"}]}), "tools[0].name must be a string"),
        ("tools", json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name must be 1 to 64 letters"),
        ("tools", json!({"tools": [tool("f"), tool("f")]}), "\"f\" twice"),
        ("tools", json!({"tools": [{"type": "function", "name": "f", "strict": 1}]}), "strict must be true or false"),
        ("tools", json!({"tools": [{"type": "function", "name": "f", "parameters": 1}]}), "must be a JSON schema"),
        ("tool_choice", named("h"), "tool_choice.name must be the name of one of tools, found \"h\""),
        ("tool_choice", json!({"tool_choice": "always"}), "must be none, auto, required or a function"),
        ("tool_choice", json!({"tool_choice": {"type": "web_search"}}), "tool_choice.type must be function"),
        ("tool_choice", json!({"tools": [], "tool_choice": "required"}), "without tools"),
        (
            "input",
            item(json!({"type": "compaction"})),
            "input[0].type must be message, function_call, function_call_output or",
        ),
        ("input", item(json!({"type": "function_call", "name": "f"})), "input[0].call_id must be a string"),
        ("input", item(json!({"type": "function_call", "call_id": "c"})), "input[0].name must be a string"),
        ("input", item(json!({"type": "function_call_output", "output": "x"})), "input[0].call_id must be a string"),
        ("input", item(json!({"type": "function_call_output", "call_id": "c"})), "input[0].output must be"),
        ("regex", json!({"regex": "a+"}), "regex must be absent or JSON if tools may be called"),
    ];
    for (param, more, part) in table {
        let (status, answer) = post(&state, &body(more)).await;
        let error = &serde_json::from_str::<Value>(&answer).unwrap()["error"];
        assert_eq!((status, error["param"].as_str()), (StatusCode::BAD_REQUEST, Some(param)), "{part}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(part), "{part}: {error}");
    }
}
