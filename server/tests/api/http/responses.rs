//! `/v1/responses` with the shipped checkpoint: shapes and events, continuing and branching, and how a response ends.

use std::time::Duration;

use crate::common::responses::{PATH, asking, events, names, path, respond, said};
use crate::common::sessions::app;
use crate::common::with;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::{Location, Store, StoreOptions};
use tidegate_server::{ApiOptions, AppState};

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
    assert!(input > 5, "instructions count as input");
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
async fn a_stream_contains_the_same_in_numbered_events_and_is_stored_before_the_last() {
    let app = app().await;
    let whole = respond(&app, asking("The king", json!({}))).await;
    let answer = app.post(PATH, asking("The king", json!({"stream": true}))).await;
    assert_eq!(answer.header("content-type"), "text/event-stream");
    let events = events(&answer.text());
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
    let (usage, input) = (&last["response"]["usage"], whole["usage"]["input_tokens"].as_u64().unwrap());
    assert_eq!((&usage["input_tokens"], &usage["output_tokens"]), (&json!(input), &whole["usage"]["output_tokens"]));
    assert_eq!(
        usage["input_tokens_details"],
        json!({"cached_tokens": input - 1, "cache_write_tokens": 1}),
        "the same prompt was read before, but for its last token"
    );
    let kept = app.get(&path(&last["response"])).await;
    assert_eq!(kept.json(), last["response"]);

    let short = app.post(PATH, asking("Once", json!({"stream": true, "logit_bias": {"0": 100}}))).await;
    let short = self::events(&short.text());
    assert_eq!(short.last().unwrap()["type"], "response.completed");
    assert!(!names(&short).contains(&"response.output_text.delta"));
}

#[tokio::test]
async fn continuing_equals_sending_the_whole_conversation() {
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
        // The same messages as input of this route, stored or not.
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
        assert_eq!(cached, long - 1, "all tokens but the last were in the state");
        assert_eq!(app.engine_stats().prompt_tokens - before, input - cached, "branch {branch}");
        assert!(input - cached < 10);
    }
}

#[tokio::test]
async fn a_response_can_be_continued_twice() {
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
async fn a_truncated_answer_continues_without_new_input() {
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
async fn text_that_may_begin_a_stop_string_is_held_back_or_released() {
    let app = app().await;
    let whole = said(&respond(&app, asking("The sea", json!({"ignore_eos": true}))).await).to_owned();
    let held: String = whole.chars().skip(whole.chars().count() - 2).collect();
    let stop = json!({"ignore_eos": true, "stop": format!("{held}\u{1F980}")});
    let kept = respond(&app, asking("The sea", stop.clone())).await;
    assert_eq!(kept["held_text"], held);
    assert_eq!(format!("{}{held}", said(&kept)), whole);
    let on = json!({"previous_response_id": kept["id"], "temperature": 0, "max_output_tokens": 4});
    assert!(said(&respond(&app, on.clone()).await).starts_with(&held));
    // A response that is not stored cannot be continued, so it holds no text back.
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
async fn a_response_whose_client_disconnects_is_not_stored() {
    let app = app().await;
    let more = json!({"stream": true, "ignore_eos": true, "max_output_tokens": 100_000});
    let mut open = app.open(PATH, asking("Once", more), &[]).await;
    let mut seen = String::new();
    while !seen.contains("response.output_text.delta") {
        seen += &open.read_some().await;
    }
    drop(open);
    while app.engine_stats().running > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(app.store.stats().versions, 0);
    let begun: Value = serde_json::from_str(seen.lines().nth(1).unwrap().strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(app.get(&path(&begun["response"])).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_response_without_space_is_refused_before_it_is_computed() {
    let (served, _thread) = open(&crate::common::checkpoint(), &OpenOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    let options = StoreOptions { owner_bytes: 1000, ..StoreOptions::new(Location::Memory) };
    state.set_store(Store::open(options, served.codec.clone()).await.unwrap());
    state.serve(served);
    for stream in [false, true] {
        let body = asking("Once", json!({"stream": stream})).to_string();
        let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
        let refused = crate::common::send(&state, request.body(Body::from(body)).unwrap()).await;
        assert_eq!(refused.status(), StatusCode::FORBIDDEN);
        assert!(crate::common::text(refused).await.contains("quota_exceeded"));
    }
}

#[tokio::test]
async fn a_response_that_cannot_be_stored_fails() {
    let (served, _thread) = open(&crate::common::checkpoint(), &OpenOptions::default()).unwrap();
    let state = AppState::new(ApiOptions::default());
    // There is space, but writing fails.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("objects"), "not a folder").unwrap();
    let objects = object_store::local::LocalFileSystem::new_with_prefix(folder.path()).unwrap();
    let options = StoreOptions::new(Location::Memory);
    state.set_store(Store::open_with(std::sync::Arc::new(objects), options, served.codec.clone()).await.unwrap());
    state.serve(served);
    let ask = |stream: bool| {
        let body = asking("Once", json!({"stream": stream, "ignore_eos": true})).to_string();
        let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
        crate::common::send(&state, request.body(Body::from(body)).unwrap())
    };
    let whole = ask(false).await;
    assert_eq!(whole.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(crate::common::text(whole).await.contains("store_unavailable"));
    let events = events(&crate::common::text(ask(true).await).await);
    let [.., delta, error, failed] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(delta["type"], "response.output_text.delta");
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("store_unavailable")));
    assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(failed["response"]["error"], json!({"code": "server_error", "message": error["message"]}));
    assert_eq!(failed["response"]["usage"], Value::Null);
    // The failed response has the text that the client has received.
    let deltas = events.iter().filter_map(|event| event["delta"].as_str());
    assert_eq!(said(&failed["response"]), deltas.collect::<String>());
}
