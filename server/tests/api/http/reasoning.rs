//! Reasoning, which models write before their answers: whole and streamed, with tools, and cut off.

use axum::body::Body;
use axum::http::{Request, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

use crate::common::parrot::parrot;
use crate::common::{events, send, text, with};

/// The template of a model that reasons.
const TEMPLATE: &str = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}{{ opening }}";

async fn post_to(state: &AppState, path: &str, body: &Value) -> String {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    text(send(state, request.body(Body::from(body.to_string())).unwrap()).await).await
}

async fn post(state: &AppState, more: Value) -> String {
    post_to(state, "/v1/chat/completions", &with(json!({"messages": [{"role": "user", "content": "u"}]}), more)).await
}

/// Returns the whole answer of a route, and the events of the same answer as a stream.
async fn both(state: &AppState, path: &str, body: Value) -> (Value, Vec<Value>) {
    let whole = serde_json::from_str(&post_to(state, path, &body).await).unwrap();
    let stream = post_to(state, path, &with(body, json!({"stream": true}))).await;
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    (whole, data.map(|data| serde_json::from_str(data).unwrap()).collect())
}

/// Joins the texts that the events of a type have under a key.
fn streamed(events: &[Value], of: &str, key: &str) -> String {
    let texts =
        events.iter().filter(|event| event["type"] == of).map(|event| event.pointer(key).and_then(Value::as_str));
    texts.flatten().collect()
}

/// Returns the reasoning and the content of an answer, and checks that a stream has the same.
async fn parts(state: &AppState, more: Value) -> [Value; 2] {
    let whole: Value = serde_json::from_str(&post(state, more.clone()).await).unwrap();
    let message = &whole["choices"][0]["message"];
    let stream = post(state, with(more, json!({"stream": true}))).await;
    let chunks = events(&stream).into_iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let deltas: Vec<Value> = chunks.map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    for key in ["reasoning_content", "content"] {
        let streamed: String = deltas.iter().filter_map(|delta| delta[key].as_str()).collect();
        assert_eq!(streamed, message[key].as_str().unwrap_or_default(), "{key}: {stream}");
    }
    ["reasoning_content", "content"].map(|key| message[key].clone())
}

#[tokio::test]
async fn reasoning_is_apart_from_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("<think>\nIs it? \n</think>\n\nYes.", TEMPLATE, folder.path());
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for more in [json!({}), json!({"logprobs": true}), json!({"return_token_ids": true}), json!({"tools": [tool]})] {
        assert_eq!(parts(&state, more.clone()).await, [json!("Is it?"), json!("Yes.")], "{more}");
    }
    assert_eq!(parts(&state, json!({"stop": ["it?"]})).await, [json!("Is"), json!("")]);
    let opened = json!({"chat_template_kwargs": {"opening": "<think>\n"}, "stop": ["it?"]});
    assert_eq!(parts(&state, opened).await[0], "<think>\nIs", "it is open already");
}

#[tokio::test]
async fn reasoning_that_the_prompt_opens_ends_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("Is it?</think>Yes.", TEMPLATE, folder.path());
    let opened = json!({"chat_template_kwargs": {"opening": "<think>\n"}});
    assert_eq!(parts(&state, opened).await, [json!("Is it?"), json!("Yes.")]);
    assert_eq!(parts(&state, json!({})).await, [Value::Null, json!("Is it?</think>Yes.")]);
}

#[tokio::test]
async fn a_model_whose_template_knows_no_reasoning_has_one_text() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("<think>No.</think>Yes.", "{{ messages[0].content }}", folder.path());
    assert_eq!(parts(&state, json!({})).await, [Value::Null, json!("<think>No.</think>Yes.")]);
}

#[tokio::test]
async fn responses_have_reasoning_as_an_item_before_the_message() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("<think>\nIs it? \n</think>\n\nYes.", TEMPLATE, folder.path());
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    for more in [json!({}), json!({"tools": [tool]})] {
        let (whole, events) = both(&state, "/v1/responses", with(json!({"input": "u", "store": false}), more)).await;
        let output = whole["output"].as_array().unwrap_or_else(|| panic!("{whole}"));
        let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
        assert_eq!(kinds, ["reasoning", "message"]);
        assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Is it?"}]));
        assert_eq!((&output[0]["summary"], &output[0]["status"]), (&json!([]), &json!("completed")));
        assert_eq!(output[1]["content"][0]["text"], "Yes.");
        let (reasoning, all) =
            (&whole["usage"]["output_tokens_details"]["reasoning_tokens"], &whole["usage"]["output_tokens"]);
        assert!(0 < reasoning.as_u64().unwrap() && reasoning.as_u64() < all.as_u64(), "{reasoning} of {all}");
        let name = |kind: &str| format!("response.reasoning_text.{kind}");
        assert_eq!(streamed(&events, &name("delta"), "/delta"), "Is it?");
        assert_eq!(streamed(&events, &name("done"), "/text"), "Is it?");
        assert_eq!(streamed(&events, "response.output_text.delta", "/delta"), "Yes.");
        let done = &events.last().unwrap()["response"];
        assert_eq!(
            (&done["output"][0]["content"], &done["output"][1]["content"]),
            (&output[0]["content"], &output[1]["content"])
        );
        assert_eq!(&done["usage"]["output_tokens_details"]["reasoning_tokens"], reasoning);
        // The items may be sent back unchanged.
        let user = json!({"role": "user", "content": "u"});
        let again = json!({"input": [user, output[0], output[1], user], "store": false});
        let (again, _) = both(&state, "/v1/responses", again).await;
        assert_eq!(again["status"], "completed", "{again}");
    }
    let (cut, _) = both(&state, "/v1/responses", json!({"input": "u", "store": false, "max_output_tokens": 12})).await;
    assert_eq!(cut["output"].as_array().map(Vec::len), Some(1), "{cut}");
    assert_eq!((&cut["output"][0]["type"], &cut["output"][0]["status"]), (&json!("reasoning"), &json!("incomplete")));
}

#[tokio::test]
async fn messages_have_reasoning_as_a_block_of_thinking() {
    let folder = tempfile::tempdir().unwrap();
    let template = format!("{TEMPLATE}{{% if enable_thinking %}}!{{% endif %}}");
    let state = parrot("<think>\nIs it? \n</think>\n\nYes.", &template, folder.path());
    let body =
        |more| with(json!({"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "u"}]}), more);
    let (whole, events) = both(&state, "/v1/messages", body(json!({}))).await;
    let blocks = json!([{"type": "thinking", "thinking": "Is it?", "signature": ""}, {"type": "text", "text": "Yes."}]);
    assert_eq!(whole["content"], blocks, "{whole}");
    assert_eq!(streamed(&events, "content_block_delta", "/delta/thinking"), "Is it?");
    let starts: Vec<&Value> = events.iter().filter(|event| event["type"] == "content_block_start").collect();
    assert_eq!(starts.iter().map(|event| &event["content_block"]["type"]).collect::<Vec<_>>(), ["thinking", "text"]);

    let read = |answer: &Value| {
        answer["usage"]["input_tokens"].as_u64().unwrap() + answer["usage"]["cache_read_input_tokens"].as_u64().unwrap()
    };
    for (kind, more) in [("enabled", 1), ("adaptive", 1), ("disabled", 0)] {
        let (asked, _) =
            both(&state, "/v1/messages", body(json!({"thinking": {"type": kind, "budget_tokens": 1024}}))).await;
        assert_eq!(read(&asked), read(&whole) + more, "{kind}: {asked}");
    }
    let cut = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": [blocks[0]]}]);
    let after = with(body(json!({"messages": cut})), json!({"thinking": {"type": "enabled"}}));
    let (after, _) = both(&state, "/v1/messages", after).await;
    assert_eq!(read(&after), read(&whole) + 1, "cut-off reasoning is no message to continue: {after}");
    let (refused, _) = both(&state, "/v1/messages", body(json!({"thinking": {"type": "on"}}))).await;
    assert_eq!(refused["error"]["param"], "thinking", "{refused}");

    // Where the answer has no room for reasoning, a prompt that begins it would spoil the answer.
    let tool = json!({"name": "f", "input_schema": {"type": "object"}});
    let said = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "The"}]);
    for more in [json!({"messages": said}), json!({"tools": [tool], "tool_choice": {"type": "any"}})] {
        let count = async |kind: &str| {
            let thinking = json!({"thinking": {"type": kind}});
            both(&state, "/v1/messages/count_tokens", with(body(more.clone()), thinking)).await.0
        };
        let refused = count("enabled").await;
        assert_eq!(refused["error"]["param"], "thinking", "{refused}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.starts_with("thinking.type must be adaptive or disabled"), "{refused}");
        let (adaptive, disabled) = (count("adaptive").await, count("disabled").await);
        assert!(adaptive["input_tokens"].is_u64() && adaptive == disabled, "{adaptive} {disabled}");
    }
}

/// A regression test: an empty answer used to have no `response.output[0]` and no `message.content[0]`.
#[tokio::test]
async fn an_answer_without_text_has_an_empty_one() {
    let folder = tempfile::tempdir().unwrap();
    let open = TEMPLATE.replace("{{ opening }}", "<think>\n");
    for (answer, template, before) in [
        ("", TEMPLATE, None),
        ("<think>x</think>", TEMPLATE, Some("x")),
        // Empty reasoning does not count as reasoning.
        ("<think>", TEMPLATE, None),
        (" ", &*open, None),
    ] {
        let state = parrot(answer, template, folder.path());
        let (response, events) = both(&state, "/v1/responses", json!({"input": "u", "store": false})).await;
        let last = response["output"].as_array().unwrap().last().unwrap();
        assert_eq!((&last["type"], &last["content"][0]["text"]), (&json!("message"), &json!("")), "{response}");
        assert_eq!(response["output"].as_array().unwrap().len(), 1 + usize::from(before.is_some()));
        assert_eq!(streamed(&events, "response.output_text.done", "/text"), "");
        let body = json!({"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "u"}]});
        let (message, _) = both(&state, "/v1/messages", body).await;
        assert_eq!(message["content"].as_array().unwrap().last(), Some(&json!({"type": "text", "text": ""})));
    }
}

const CALL: &str = r#"{"name": "f", "arguments": {"a": 1}}"#;

/// Runs `check` on a model that reasons and then answers, for each way in which a prompt can begin the reasoning.
async fn after_reasoning(answer: &str, check: impl AsyncFn(AppState)) {
    let folder = tempfile::tempdir().unwrap();
    for (opening, reasoning) in
        [("", "<think>\nIs it?\n</think>"), ("<think>\n", "Is it?</think>"), ("<think", ">\nIs it?</think>")]
    {
        for space in ["", "\n\n"] {
            let template = TEMPLATE.replace("{{ opening }}", opening);
            check(parrot(&format!("{reasoning}{space}{answer}"), &template, folder.path())).await;
        }
    }
}

#[tokio::test]
async fn a_call_may_follow_reasoning() {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let function = json!({"name": "f", "parameters": parameters});
    after_reasoning(CALL, async |state| {
        let chat = json!({"tools": [{"type": "function", "function": function}]});
        let answer: Value = serde_json::from_str(&post(&state, chat.clone()).await).unwrap();
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["message"]["reasoning_content"], &choice["message"]["content"]),
            (&json!("Is it?"), &Value::Null)
        );
        let called = json!({"name": "f", "arguments": "{\"a\": 1}"});
        assert_eq!(choice["message"]["tool_calls"][0]["function"], called, "{answer}");
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let stream = post(&state, with(chat, json!({"stream": true}))).await;
        let deltas: Vec<Value> = events(&stream).iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
        let joined = |path: &str| -> String {
            deltas.iter().filter_map(|delta| delta["choices"][0]["delta"].pointer(path)?.as_str()).collect()
        };
        assert_eq!((joined("/reasoning_content"), joined("/content")), ("Is it?".into(), String::new()), "{stream}");
        assert_eq!(joined("/tool_calls/0/function/arguments"), "{\"a\": 1}", "{stream}");

        let flat = with(json!({"type": "function"}), function.clone());
        let (called, _) = both(&state, "/v1/responses", json!({"input": "u", "store": false, "tools": [flat]})).await;
        let kinds: Vec<&Value> = called["output"].as_array().unwrap().iter().map(|item| &item["type"]).collect();
        assert_eq!(kinds, ["reasoning", "function_call"], "{called}");
        let usage = &called["usage"];
        let reasoning = usage["output_tokens_details"]["reasoning_tokens"].as_u64();
        assert!(Some(0) < reasoning && reasoning < usage["output_tokens"].as_u64(), "{called}");

        let tool = json!({"name": "f", "input_schema": parameters});
        let body =
            json!({"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "u"}], "tools": [tool]});
        let (called, _) = both(&state, "/v1/messages", body).await;
        let kinds: Vec<&Value> = called["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
        assert_eq!(kinds, ["thinking", "tool_use"], "{called}");
        assert_eq!((&called["content"][1]["input"], &called["stop_reason"]), (&json!({"a": 1}), &json!("tool_use")));
    })
    .await;
}

/// The model wants to go on after its last call, which the form does not allow.
#[tokio::test]
async fn forced_and_parallel_calls_follow_reasoning_that_the_prompt_began() {
    let parameters = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]});
    let tools =
        ["f", "g"].map(|name| json!({"type": "function", "function": {"name": name, "parameters": parameters}}));
    let call = |name: &str| format!(r#"{{"name": "{name}", "arguments": {{"a": 1}}}}"#);
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (choice, parallel, answer, names) in [
        (json!("required"), false, call("f") + "\nAnd?", &["f"][..]),
        (named, false, call("g") + "x", &["g"]),
        (json!("required"), true, format!("{}\n{}", call("f"), call("g")), &["f", "g"]),
        (json!("auto"), true, format!("{}\n{}", call("g"), call("f")), &["g", "f"]),
    ] {
        for (opening, begun) in [("<think>\n", ""), ("<think", ">\n")] {
            let folder = tempfile::tempdir().unwrap();
            let template = TEMPLATE.replace("{{ opening }}", opening);
            let state = parrot(&format!("{begun}Is it?</think>\n{answer}"), &template, folder.path());
            let chat = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel});
            let whole: Value = serde_json::from_str(&post(&state, chat.clone()).await).unwrap();
            let message = &whole["choices"][0]["message"];
            assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Is it?"), &Value::Null));
            let calls = message["tool_calls"].as_array().unwrap();
            let called: Vec<&Value> = calls.iter().map(|call| &call["function"]["name"]).collect();
            assert_eq!(called, names, "{choice}: {whole}");
            assert!(calls.iter().all(|call| call["function"]["arguments"] == r#"{"a": 1}"#), "{whole}");

            let stream = post(&state, with(chat, json!({"stream": true}))).await;
            let deltas = events(&stream).into_iter().filter_map(|data| serde_json::from_str::<Value>(data).ok());
            let deltas: Vec<Value> = deltas.map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
            let reasoning: String = deltas.iter().filter_map(|delta| delta["reasoning_content"].as_str()).collect();
            let streamed = deltas.iter().filter_map(|delta| delta["tool_calls"][0]["function"]["name"].as_str());
            assert_eq!((&*reasoning, streamed.collect::<Vec<_>>()), ("Is it?", names.to_vec()), "{stream}");
        }
    }
}

#[tokio::test]
async fn text_after_reasoning_is_no_call_unless_it_begins_as_one() {
    after_reasoning("I call {\"name\": \"f\"", async |state| {
        let tools = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
        assert_eq!(parts(&state, tools).await, [json!("Is it?"), json!("I call {\"name\": \"f\"")]);
    })
    .await;
}

#[tokio::test]
async fn an_answer_that_has_to_have_a_form_has_it_after_reasoning_that_the_prompt_began() {
    let folder = tempfile::tempdir().unwrap();
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [[1, 2]]}}});
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for (answer, more) in [
        ("[1, 2]", json!({"response_format": format})),
        ("[1, 2]", json!({"response_format": format, "tools": [tool]})),
        ("{\"b\": 2}", json!({"response_format": {"type": "json_object"}})),
        ("no", json!({"guided_choice": ["yes", "no"]})),
        ("7", json!({"regex": "[0-9]"})),
        ("abab", json!({"guided_grammar": "start: (\"a\" \"b\")+"})),
    ] {
        for (opening, begun) in [("<think>\n", ""), ("<think", ">\n")] {
            let template = TEMPLATE.replace("{{ opening }}", opening);
            // With `wrong`, the model would write more than the form permits.
            for wrong in ["", "x"] {
                let text = format!("{begun}Is it?</think>\n{answer}{wrong}");
                let state = parrot(&text, &template, folder.path());
                assert_eq!(parts(&state, more.clone()).await, [json!("Is it?"), json!(answer)], "{more}");
            }
        }
        // Where the prompt has not begun reasoning, the answer has its form from its first token.
        let state = parrot(answer, TEMPLATE, folder.path());
        assert_eq!(parts(&state, more.clone()).await, [Value::Null, json!(answer)], "{more}");
    }
    let template = TEMPLATE.replace("{{ opening }}", "<think>");
    let state = parrot("Is it?</think>[1, 2]", &template, folder.path());
    let schema = json!({"type": "json_schema", "schema": {"enum": [[1, 2]]}});
    let body = json!({"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "u"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"format": schema}});
    let (answer, _) = both(&state, "/v1/messages", body).await;
    assert_eq!(
        (&answer["content"][0]["thinking"], &answer["content"][1]["text"]),
        (&json!("Is it?"), &json!("[1, 2]"))
    );
}

/// The turn matters because many templates refuse two user turns in a row.
#[tokio::test]
async fn reasoning_that_was_cut_off_is_a_turn_in_a_history() {
    let folder = tempfile::tempdir().unwrap();
    let state = parrot("Yes.", "{% for m in messages %}[{{ m.role }}]{% endfor %}</think>", folder.path());
    let (user, item) = (json!({"role": "user", "content": "u"}), json!({"type": "reasoning", "summary": []}));
    let empty = json!({"role": "assistant", "content": ""});
    let read = async |input: Value| {
        let (answer, _) = both(&state, "/v1/responses", json!({"input": input, "store": false})).await;
        answer["usage"]["input_tokens"].as_u64().unwrap_or_else(|| panic!("{answer}"))
    };
    let with_turn = read(json!([user, empty, user])).await;
    assert_eq!(read(json!([user, item, user])).await, with_turn);
    assert_eq!(read(json!([user, item, empty, user])).await, with_turn);
    // At the start, reasoning may follow a stored answer; at the end, nothing follows it. Neither adds a turn.
    let (first, last) = (read(json!([item, user])).await, read(json!([user, item])).await);
    assert_eq!((first, last), (read(json!([user])).await, read(json!([user])).await));
}
