//! Stored responses: storing, owners, repeated requests, and unsupported parameters.

use crate::common::responses::{PATH, asking, events, names, path, respond};
use crate::common::sessions::app;
use crate::common::with;
use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

#[tokio::test]
async fn a_stored_response_can_be_read_until_it_is_deleted() {
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
    // Continuations do not depend on the deleted response.
    respond(&app, asking("On", json!({"previous_response_id": second["id"]}))).await;
}

#[tokio::test]
async fn other_owners_responses_look_like_missing_ones() {
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
async fn a_response_with_store_false_is_not_stored() {
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
async fn a_repeated_request_gets_the_first_result() {
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
            assert_eq!(app.store.stats().versions, versions, "it did not run twice");
            let other = with(body, json!({"input": "Twice"}));
            let other = app.send(Method::POST, PATH, other, &headers).await;
            assert_eq!(other.status, StatusCode::UNPROCESSABLE_ENTITY);
            if !stream {
                assert_eq!(first.body, again.body);
                continue;
            }
            let (first, again) = (events(&first.text()), events(&again.text()));
            assert_eq!(names(&first), names(&again), "store {store}");
            assert_eq!(first.last().unwrap()["response"], again.last().unwrap()["response"]);
            // Later events may differ in their sequence numbers and in how the text is split.
            assert_eq!(first[..4], again[..4]);
        }
    }
}

#[tokio::test]
async fn unsupported_parameters_are_refused_by_name() {
    let app = app().await;
    let long = "x".repeat(513);
    let table = [
        ("input", json!({"input": null})),
        ("input", json!({"input": []})),
        ("input", json!({"input": 7})),
        ("input", json!({"input": [{"role": "user"}]})),
        ("input", json!({"input": [{"role": "tool", "content": "x"}]})),
        ("input", json!({"input": [{"content": "x"}]})),
        ("input", json!({"input": [{"type": "function_call_output", "output": "y"}]})),
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
        ("include", json!({"include": ["everything"]})),
        ("moderation", json!({"moderation": {"mode": "score"}})),
        ("prompt", json!({"prompt": {"id": "x"}})),
        ("tools", json!({"tools": [{"type": "web_search"}]})),
        ("tool_choice", json!({"tool_choice": "required"})),
        ("tool_choice", json!({"tool_choice": {"type": "function", "name": "f"}})),
        ("text", json!({"text": {"format": {"type": "xml"}}})),
        ("top_logprobs", json!({"top_logprobs": 3})),
        ("truncation", json!({"truncation": "yes"})),
        ("stream_options", json!({"stream_options": {}})),
        ("stream_options", json!({"stream": true, "stream_options": {"include_obfuscation": true}})),
        ("n", json!({"n": 2})),
        ("guided_json", json!({"guided_json": 7})),
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
async fn hints_and_default_values_of_unsupported_fields_are_accepted() {
    let app = app().await;
    let body = json!({"background": false, "include": ["reasoning.encrypted_content", "file_search_call.results"], "tools": [], "tool_choice": "none", "truncation": "auto",
        "parallel_tool_calls": false, "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "service_tier": "auto", "top_logprobs": 0, "stream_options": null, "conversation": null, "metadata": null,
        "max_tool_calls": 4, "prompt_cache_key": "x", "safety_identifier": "y", "max_output_tokens": 1});
    let response = respond(&app, asking(json!([{"role": "developer", "content": "x"}]), body)).await;
    assert_eq!((&response["tool_choice"], &response["truncation"]), (&json!("none"), &json!("auto")));
    assert_eq!((&response["parallel_tool_calls"], &response["metadata"]), (&json!(false), &json!({})));
}

#[tokio::test]
async fn tokens_are_counted_as_they_would_be_read() {
    const COUNT: &str = "/v1/responses/input_tokens";
    let app = app().await;
    let kept = app.store.stats().versions;
    let first = asking("Once", json!({"instructions": "Be brief."}));
    let counted = app.post(COUNT, first.clone()).await.json();
    assert_eq!(app.store.stats().versions, kept, "counting stores nothing");
    let made = respond(&app, first).await;
    let expected = |tokens: &Value| json!({"object": "response.input_tokens", "input_tokens": tokens});
    assert_eq!(counted, expected(&made["usage"]["input_tokens"]));
    let next = asking("On", json!({"previous_response_id": made["id"]}));
    let counted = app.post(COUNT, next.clone()).await.json();
    assert_eq!(counted, expected(&respond(&app, next).await["usage"]["input_tokens"]), "the conversation counts too");

    let chat = json!({"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1});
    let read = app.post("/v1/chat/completions", chat.clone()).await.json();
    for path in ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"] {
        assert_eq!(app.post(path, chat.clone()).await.json(), expected(&read["usage"]["prompt_tokens"]));
        let refused = app.post(path, with(chat.clone(), json!({"session": "x"}))).await;
        assert_eq!((refused.status, refused.param()), (StatusCode::BAD_REQUEST, "session".into()));
    }
    let none = "resp_00000000000000000000000000000000";
    for (more, status, param) in [
        (json!({"input": null}), StatusCode::BAD_REQUEST, "input"),
        (json!({"model": "fox"}), StatusCode::NOT_FOUND, "model"),
        (json!({"previous_response_id": none}), StatusCode::NOT_FOUND, "previous_response_id"),
    ] {
        let refused = app.post(COUNT, asking("Once", more)).await;
        assert_eq!((refused.status, refused.param()), (status, param.into()));
    }
}
