//! `/v1/responses` on the shipped checkpoint: shapes and events, going on and branching, what is kept and for whom.

mod common;

use axum::http::{Method, StatusCode};
use common::sessions::{Answer, App, app};
use common::with;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

/// Greedy, so that a text must be the same however it is asked for.
fn asking(input: impl Into<Value>, more: Value) -> Value {
    with(json!({"input": input.into(), "max_output_tokens": 12, "temperature": 0}), more)
}

async fn respond(app: &App, body: Value) -> Value {
    let answer = app.post(PATH, body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    answer.json()
}

fn said(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

fn path(response: &Value) -> String {
    format!("{PATH}/{}", response["id"].as_str().unwrap())
}

/// The events of a stream; each is named twice, and numbered from 0.
fn events(answer: &Answer) -> Vec<Value> {
    let text = answer.text();
    let blocks: Vec<&str> = text.split_terminator("\n\n").collect();
    let event = |(number, block): (usize, &&str)| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        assert_eq!(event["sequence_number"], number);
        event
    };
    blocks.iter().enumerate().map(event).collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    names.dedup();
    names
}

#[tokio::test]
async fn a_response_has_openais_shape() {
    let app = app().await;
    let more = json!({"instructions": "Tell it well.", "metadata": {"tale": "1"}, "user": "me", "top_p": 0.5,
        "ignore_eos": true, "model": "tidegate-tiny"});
    let response = respond(&app, asking("Once upon a time", more)).await;
    let id = response["id"].as_str().unwrap();
    assert!(id.starts_with("resp_") && id.len() == 37, "{id}");
    assert!(response["created_at"].as_u64().unwrap() > 1_700_000_000);
    let message = &response["output"][0];
    assert!(message["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!(
        *message,
        json!({"id": message["id"], "type": "message", "status": "incomplete", "role": "assistant",
            "content": [{"type": "output_text", "text": said(&response), "annotations": [], "logprobs": []}]})
    );
    let usage = &response["usage"];
    let input = usage["input_tokens"].as_u64().unwrap();
    assert!(input > 5, "instructions are counted too");
    assert_eq!(
        *usage,
        json!({"input_tokens": input, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": input},
            "output_tokens": 12, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": input + 12})
    );
    let expected = json!({"object": "response", "status": "incomplete", "completed_at": null, "background": false,
        "error": null, "incomplete_details": {"reason": "max_output_tokens"}, "instructions": "Tell it well.",
        "max_output_tokens": 12, "model": "tidegate-tiny", "parallel_tool_calls": true,
        "previous_response_id": null, "reasoning": {"effort": null, "summary": null}, "service_tier": "default",
        "store": true, "temperature": 0.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [], "top_logprobs": 0, "top_p": 0.5, "truncation": "disabled", "user": "me",
        "metadata": {"tale": "1"}});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(response[name], *value, "{name}");
    }
    let ended = respond(&app, asking("Once", json!({"logit_bias": {"0": 100}}))).await;
    assert_eq!((&ended["status"], &ended["incomplete_details"]), (&json!("completed"), &Value::Null));
    assert_eq!((said(&ended), &ended["output"][0]["status"]), ("", &json!("completed")));
    assert!(ended["completed_at"].as_u64() >= ended["created_at"].as_u64());
}

#[tokio::test]
async fn a_stream_says_the_same_in_numbered_events_and_is_kept_before_its_last() {
    let app = app().await;
    let whole = respond(&app, asking("The king", json!({}))).await;
    let answer = app.post(PATH, asking("The king", json!({"stream": true}))).await;
    assert_eq!(answer.header("content-type"), "text/event-stream");
    let events = events(&answer);
    let order = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names(&events), order);
    let [created, in_progress, item, part, deltas @ .., text, part_done, item_done, last] = events.as_slice() else {
        panic!("{events:?}")
    };
    for begun in [created, in_progress] {
        let response = &begun["response"];
        assert_eq!((&response["status"], &response["output"]), (&json!("in_progress"), &json!([])));
        assert_eq!((&response["usage"], &response["id"]), (&Value::Null, &last["response"]["id"]));
    }
    assert_eq!((&item["item"]["content"], &item["item"]["status"]), (&json!([]), &json!("in_progress")));
    assert_eq!(part["part"], json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []}));
    assert!(deltas.len() > 4, "the text came in {} pieces", deltas.len());
    let together: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(together, said(&whole));
    for event in deltas.iter().chain([part, text, part_done]) {
        assert_eq!((&event["output_index"], &event["content_index"]), (&json!(0), &json!(0)));
        assert_eq!(event["item_id"], item["item"]["id"]);
    }
    assert_eq!((&text["text"], &part_done["part"]["text"]), (&json!(together), &json!(together)));
    assert_eq!(item_done["item"], last["response"]["output"][0]);
    assert_eq!(last["response"]["usage"], whole["usage"]);
    let kept = app.get(&path(&last["response"])).await;
    assert_eq!(kept.json(), last["response"]);

    let short = app.post(PATH, asking("Once", json!({"stream": true, "logit_bias": {"0": 100}}))).await;
    let short = self::events(&short);
    assert_eq!(short.last().unwrap()["type"], "response.completed");
    assert!(!names(&short).contains(&"response.output_text.delta"));
}

#[tokio::test]
async fn going_on_is_the_whole_conversation_sent_at_once() {
    let app = app().await;
    for (sampling, options) in [("greedy", json!({})), ("drawn", json!({"temperature": 1.0, "seed": 11}))] {
        let first = respond(&app, asking("Tell me of a fox.", options.clone())).await;
        let more = with(options.clone(), json!({"previous_response_id": first["id"]}));
        let second = respond(&app, asking("And then?", more)).await;
        assert_eq!(second["previous_response_id"], first["id"]);
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let messages =
            [message("user", "Tell me of a fox."), message("assistant", said(&first)), message("user", "And then?")];
        let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
        let chat = app.post("/v1/chat/completions", with(body, options.clone())).await.json();
        assert_eq!(chat["choices"][0]["message"]["content"], said(&second), "{sampling}");
        assert_eq!(chat["usage"]["prompt_tokens"], second["usage"]["input_tokens"], "{sampling}");
        // The same messages as this route's input, kept or not.
        let parts = json!([
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me of a fox."}]},
            first["output"][0],
            {"role": "user", "content": "And then?"},
        ]);
        for store in [true, false] {
            let whole = respond(&app, asking(parts.clone(), with(options.clone(), json!({"store": store})))).await;
            assert_eq!(said(&whole), said(&second), "{sampling}, store {store}");
        }
    }
}

#[tokio::test]
async fn nothing_is_computed_again() {
    let app = app().await;
    let first = respond(&app, asking("It was a long story. ".repeat(40), json!({}))).await;
    let long = first["usage"]["total_tokens"].as_u64().unwrap();
    for branch in 0..2 {
        let before = app.engine_stats().prompt_tokens;
        let second = respond(&app, asking("Go on", json!({"previous_response_id": first["id"]}))).await;
        let usage = &second["usage"];
        let (input, cached) = (&usage["input_tokens"], &usage["input_tokens_details"]["cached_tokens"]);
        let (input, cached) = (input.as_u64().unwrap(), cached.as_u64().unwrap());
        assert_eq!(cached, long - 1, "all but the last token were in the state");
        assert_eq!(app.engine_stats().prompt_tokens - before, input - cached, "branch {branch}");
        assert!(input - cached < 10);
    }
}

#[tokio::test]
async fn a_response_can_be_gone_on_with_twice() {
    let app = app().await;
    let first = respond(&app, asking("Tell me of a fox.", json!({}))).await;
    let on = json!({"previous_response_id": first["id"]});
    let left = respond(&app, asking("And the hen?", on.clone())).await;
    let right = respond(&app, asking("And the moon, and the sea?", on.clone())).await;
    assert_ne!(left["usage"]["input_tokens"], right["usage"]["input_tokens"]);
    assert_eq!(said(&respond(&app, asking("And the hen?", on)).await), said(&left));
    let deeper = respond(&app, asking("Why?", json!({"previous_response_id": left["id"]}))).await;
    let total = left["usage"]["total_tokens"].as_u64().unwrap();
    assert!(deeper["usage"]["input_tokens"].as_u64().unwrap() > total);
}

#[tokio::test]
async fn an_answer_that_was_cut_off_goes_on_where_nothing_is_added() {
    let app = app().await;
    let whole = respond(&app, asking("Once upon a time", json!({"max_output_tokens": 24, "ignore_eos": true}))).await;
    let first = respond(&app, asking("Once upon a time", json!({"ignore_eos": true}))).await;
    let on = json!({"previous_response_id": first["id"], "max_output_tokens": 12, "temperature": 0,
        "ignore_eos": true});
    let second = respond(&app, on).await;
    assert_eq!(format!("{}{}", said(&first), said(&second)), said(&whole));
    let ended = respond(&app, asking("Once", json!({"logit_bias": {"0": 100}}))).await;
    let answer = app.post(PATH, json!({"previous_response_id": ended["id"]})).await;
    assert_eq!((answer.status, answer.param()), (StatusCode::BAD_REQUEST, "input".into()));
}

#[tokio::test]
async fn text_that_may_begin_a_stop_string_waits_or_comes_out() {
    let app = app().await;
    let whole = said(&respond(&app, asking("The sea", json!({"ignore_eos": true}))).await).to_owned();
    let held: String = whole.chars().skip(whole.chars().count() - 2).collect();
    let stop = json!({"ignore_eos": true, "stop": format!("{held}\u{1F980}")});
    let kept = respond(&app, asking("The sea", stop.clone())).await;
    assert_eq!(kept["held_text"], held);
    assert_eq!(format!("{}{held}", said(&kept)), whole);
    let on = json!({"previous_response_id": kept["id"], "temperature": 0, "max_output_tokens": 4});
    assert!(said(&respond(&app, on.clone()).await).starts_with(&held));
    // Nobody goes on with a response that is not kept.
    let begun = respond(&app, asking("The sea", json!({"ignore_eos": true, "max_output_tokens": 4}))).await;
    let last = with(
        stop,
        json!({"previous_response_id": begun["id"], "store": false, "temperature": 0,
        "max_output_tokens": 8}),
    );
    let last = respond(&app, last).await;
    assert_eq!(format!("{}{}", said(&begun), said(&last)), whole);
    assert_eq!(last["held_text"], Value::Null);
}

#[tokio::test]
async fn what_is_kept_is_given_back_until_it_is_deleted() {
    let app = app().await;
    let answer = app.post(PATH, asking("Once", json!({}))).await;
    let (response, path) = (answer.json(), path(&answer.json()));
    let kept = app.get(&path).await;
    assert_eq!((kept.status, kept.header("content-type")), (StatusCode::OK, "application/json".into()));
    assert_eq!(kept.body, answer.body);
    assert_eq!(app.get(&format!("{path}?stream=false")).await.status, StatusCode::OK);
    for (query, param) in
        [("stream=true", "stream"), ("starting_after=3", "starting_after"), ("include[]=x", "include")]
    {
        let refused = app.get(&format!("{path}?{query}")).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, param.into()));
    }
    let second = respond(&app, asking("On", json!({"previous_response_id": response["id"]}))).await;
    let deleted = app.send(Method::DELETE, &path, Value::Null, &[]).await;
    assert_eq!(deleted.json(), json!({"id": response["id"], "object": "response", "deleted": true}));
    assert_eq!(app.get(&path).await.status, StatusCode::NOT_FOUND);
    assert_eq!(app.send(Method::DELETE, &path, Value::Null, &[]).await.status, StatusCode::NOT_FOUND);
    let gone = app.post(PATH, asking("On", json!({"previous_response_id": response["id"]}))).await;
    assert_eq!((gone.status, gone.param()), (StatusCode::NOT_FOUND, "previous_response_id".into()));
    // What has grown from it stands by itself.
    respond(&app, asking("On", json!({"previous_response_id": second["id"]}))).await;
}

#[tokio::test]
async fn another_owners_response_is_as_one_that_never_was() {
    let app = app().await;
    let mine = [("authorization", "Bearer mine")];
    let response = app.send(Method::POST, PATH, asking("Once", json!({})), &mine).await.json();
    let path = path(&response);
    assert_eq!(app.send(Method::GET, &path, Value::Null, &mine).await.status, StatusCode::OK);
    let none = "resp_00000000000000000000000000000000";
    for theirs in [&[("authorization", "Bearer theirs")][..], &[]] {
        let ask = |method, path: String, body| {
            let app = &app;
            async move { app.send(method, &path, body, theirs).await }
        };
        for method in [Method::GET, Method::DELETE] {
            let one = ask(method.clone(), path.clone(), Value::Null).await;
            let never = ask(method.clone(), format!("{PATH}/{none}"), Value::Null).await;
            assert_eq!((one.status, &one.body), (StatusCode::NOT_FOUND, &never.body));
        }
        let on = |id: &str| asking("On", json!({"previous_response_id": id}));
        let one = ask(Method::POST, PATH.into(), on(response["id"].as_str().unwrap())).await;
        for never in [none, "resp_", "x", ""] {
            let never = ask(Method::POST, PATH.into(), on(never)).await;
            assert_eq!((one.status, &one.body), (StatusCode::NOT_FOUND, &never.body));
        }
        assert_eq!((one.param().as_str(), one.code().as_str()), ("previous_response_id", "not_found"));
    }
    assert_eq!(app.send(Method::GET, &path, Value::Null, &mine).await.status, StatusCode::OK);
}

#[tokio::test]
async fn what_is_not_to_be_stored_is_not() {
    let app = app().await;
    let first = respond(&app, asking("Once", json!({}))).await;
    let versions = app.store.stats().versions;
    for more in [json!({"store": false}), json!({"store": false, "previous_response_id": first["id"]})] {
        let response = respond(&app, asking("Once", more)).await;
        assert_eq!(response["store"], false);
        assert_eq!(response["usage"]["input_tokens_details"]["cache_write_tokens"], 0);
        assert_eq!(app.get(&path(&response)).await.status, StatusCode::NOT_FOUND);
        let on = app.post(PATH, asking("On", json!({"previous_response_id": response["id"]}))).await;
        assert_eq!((on.status, on.param()), (StatusCode::NOT_FOUND, "previous_response_id".into()));
    }
    assert_eq!(app.store.stats().versions, versions);
}

#[tokio::test]
async fn a_request_sent_again_gets_the_first_result() {
    let app = app().await;
    for (key, store, more) in [("a", true, json!({})), ("b", false, json!({"store": false}))] {
        for stream in [false, true] {
            let key = format!("{key}{stream}");
            let headers = [("idempotency-key", key.as_str())];
            let options = with(more.clone(), json!({"temperature": 2.0, "stream": stream}));
            let body = asking("Once upon a time", options);
            let first = app.send(Method::POST, PATH, body.clone(), &headers).await;
            let versions = app.store.stats().versions;
            let again = app.send(Method::POST, PATH, body.clone(), &headers).await;
            assert_eq!(app.store.stats().versions, versions, "it did not happen twice");
            let other = with(body, json!({"input": "Twice"}));
            let other = app.send(Method::POST, PATH, other, &headers).await;
            assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
            if !stream {
                assert_eq!(first.body, again.body);
                continue;
            }
            let (first, again) = (events(&first), events(&again));
            assert_eq!(names(&first), names(&again), "store {store}");
            assert_eq!(first.last().unwrap()["response"], again.last().unwrap()["response"]);
            // But for the numbers, and for the pieces that the text came in.
            assert_eq!(first[..4], again[..4]);
        }
    }
}

#[tokio::test]
async fn what_is_not_supported_is_refused_by_its_name() {
    let app = app().await;
    let long = "x".repeat(513);
    let table = [
        ("input", json!({"input": null})),
        ("input", json!({"input": []})),
        ("input", json!({"input": 7})),
        ("input", json!({"input": [{"role": "user"}]})),
        ("input", json!({"input": [{"role": "tool", "content": "x"}]})),
        ("input", json!({"input": [{"content": "x"}]})),
        ("input", json!({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]})),
        ("input", json!({"input": [{"type": "item_reference", "id": "msg_1"}]})),
        ("input", json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]})),
        ("instructions", json!({"instructions": ["x"]})),
        ("max_output_tokens", json!({"max_output_tokens": 0})),
        ("max_output_tokens", json!({"max_output_tokens": 1_000_001})),
        ("max_output_tokens", json!({"max_output_tokens": "x"})),
        ("max_tokens", json!({"max_tokens": 5})),
        ("max_completion_tokens", json!({"max_completion_tokens": 5})),
        ("messages", json!({"messages": []})),
        ("session", json!({"session": "ses_x"})),
        ("state", json!({"state": "x"})),
        ("return_state", json!({"return_state": true})),
        ("return_token_ids", json!({"return_token_ids": true})),
        ("label", json!({"label": "x"})),
        ("on_disconnect", json!({"on_disconnect": "continue"})),
        ("temperature", json!({"temperature": 3})),
        ("top_p", json!({"top_p": 0})),
        ("store", json!({"store": "yes"})),
        ("background", json!({"background": true})),
        ("conversation", json!({"conversation": "conv_x"})),
        ("context_management", json!({"context_management": [{"type": "compaction"}]})),
        ("include", json!({"include": ["message.output_text.logprobs"]})),
        ("moderation", json!({"moderation": {"mode": "score"}})),
        ("prompt", json!({"prompt": {"id": "x"}})),
        ("reasoning", json!({"reasoning": {"effort": "low"}})),
        ("service_tier", json!({"service_tier": "priority"})),
        ("tools", json!({"tools": [{"type": "web_search"}]})),
        ("tool_choice", json!({"tool_choice": "required"})),
        ("tool_choice", json!({"tool_choice": {"type": "function", "name": "f"}})),
        ("text", json!({"text": {"format": {"type": "json_object"}}})),
        ("text", json!({"text": {"verbosity": "low"}})),
        ("top_logprobs", json!({"top_logprobs": 3})),
        ("truncation", json!({"truncation": "yes"})),
        ("stream_options", json!({"stream_options": {}})),
        ("stream_options", json!({"stream": true, "stream_options": {"include_obfuscation": true}})),
        ("n", json!({"n": 2})),
        ("guided_json", json!({"guided_json": {}})),
        ("metadata", json!({"metadata": {"x": 1}})),
        ("metadata", json!({"metadata": {"x": long}})),
        ("metadata", json!({"metadata": {long.clone(): "x"}})),
        (
            "metadata",
            json!({"metadata": (0..17).map(|n| (n.to_string(), "x".into())).collect::<serde_json::Map<_, _>>()}),
        ),
    ];
    for (param, change) in table {
        let answer = app.post(PATH, with(asking("x", json!({})), change.clone())).await;
        assert_eq!((answer.status, answer.param()), (StatusCode::BAD_REQUEST, param.into()), "{change}");
        let error = &answer.json()["error"];
        assert!(error["message"].as_str().unwrap().contains(param), "{change}: {error}");
    }
    let answer = app.post(PATH, asking("x", json!({"model": "gpt-4"}))).await;
    assert_eq!((answer.status, answer.param()), (StatusCode::NOT_FOUND, "model".into()));
    assert_eq!(app.store.stats().versions, 0);
}

#[tokio::test]
async fn values_that_ask_for_nothing_are_accepted() {
    let app = app().await;
    let body = json!({"background": false, "include": [], "tools": [], "tool_choice": "none", "truncation": "auto",
        "parallel_tool_calls": false, "reasoning": {"effort": null}, "text": {"format": {"type": "text"}},
        "service_tier": "auto", "top_logprobs": 0, "stream_options": null, "conversation": null, "metadata": null,
        "max_tool_calls": 4, "prompt_cache_key": "x", "safety_identifier": "y", "max_output_tokens": 1});
    let response = respond(&app, asking(json!([{"role": "developer", "content": "x"}]), body)).await;
    assert_eq!((&response["tool_choice"], &response["truncation"]), (&json!("none"), &json!("auto")));
    assert_eq!((&response["parallel_tool_calls"], &response["metadata"]), (&json!(false), &json!({})));
}
