//! A checkpoint of RWKV-7 with its vocabulary file, served like any other: texts, chat, sessions, grammars and prefixes.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

use crate::common::random::written_rwkv7;
use crate::common::sessions::{App, app_on, ids, ok, prompt, session, state_of};
use crate::common::with;

const TEXT: &str = "the fox said: how deep is the river?";

async fn served() -> (App, TempDir) {
    let model = written_rwkv7();
    let options = OpenOptions { slots: 8, ..OpenOptions::default() };
    (app_on(model.path(), options, Location::Memory).await, model)
}

fn path(session: &Value) -> String {
    format!("/v1/sessions/{}", session["id"].as_str().unwrap())
}

/// Returns a sampled request for 8 tokens.
fn sampled(text: &str, more: Value) -> Value {
    prompt(text, with(json!({"temperature": 1.0, "ignore_eos": true}), more))
}

async fn turn(app: &App, session: &Value, text: &str) -> Value {
    ok(app, "/v1/completions", sampled(text, json!({"session": session["id"]}))).await
}

#[tokio::test]
async fn a_text_is_the_same_alone_in_a_batch_and_after_a_known_prefix() {
    let (app, _model) = served().await;
    let request = |seed: u64| sampled(TEXT, json!({"seed": seed, "max_tokens": 24}));
    let mut alone = Vec::new();
    for seed in 0..6 {
        alone.push(ids(&ok(&app, "/v1/completions", request(seed)).await));
    }
    assert!(alone.iter().all(|ids| ids.len() == 24) && alone.windows(2).all(|pair| pair[0] != pair[1]));
    let (fresh, _model) = served().await;
    let together =
        futures_util::future::join_all((0..6).map(|seed| ok(&fresh, "/v1/completions", request(seed)))).await;
    assert_eq!(together.iter().map(ids).collect::<Vec<_>>(), alone);

    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let longer = || sampled(&format!("{TEXT} said the fox"), json!({"seed": 3}));
    let known = ok(&app, "/v1/completions", longer()).await;
    let (fresh, _model) = served().await;
    let computed = ok(&fresh, "/v1/completions", longer()).await;
    assert!(cached(&known) > 0 && cached(&computed) == 0, "{known}");
    assert_eq!(ids(&known), ids(&computed));
}

#[tokio::test]
async fn sessions_fork_rewind_and_move_bit_for_bit() {
    let ((here, _model), (there, _same)) = (served().await, served().await);
    let whole = ok(&here, "/v1/completions", sampled(TEXT, json!({"seed": 3, "max_tokens": 24}))).await;
    let made = session(&here, json!({"seed": 3})).await;
    let first = turn(&here, &made, TEXT).await;
    let fork = ok(&here, &format!("{}/fork", path(&made)), json!({})).await["data"][0].clone();
    let file = here.get(&format!("{}/snapshot", path(&made))).await.body;
    let second = turn(&here, &made, "").await;
    let third = turn(&here, &made, "").await;
    assert_eq!([ids(&first), ids(&second), ids(&third)].concat(), ids(&whole));
    assert_eq!(ids(&turn(&here, &fork, "").await), ids(&second));

    let moved = there.upload(file).await;
    assert_eq!(moved.status, StatusCode::CREATED, "{}", moved.text());
    let moved = moved.json();
    assert_eq!(ids(&turn(&there, &moved, "").await), ids(&second));
    assert_eq!(ids(&turn(&there, &moved, "").await), ids(&third));
    let stayed = here.get(&format!("{}/snapshot", path(&made))).await.body;
    let went = there.get(&format!("{}/snapshot", path(&moved))).await.body;
    assert!(state_of(&stayed) == state_of(&went), "a bit differs");

    let back = json!({"version": first["session"]["version"]});
    ok(&here, &format!("{}/rewind", path(&made)), back).await;
    assert_eq!(ids(&turn(&here, &made, "").await), ids(&second));
}

#[tokio::test]
async fn a_grammar_spells_characters_that_lie_in_several_tokens() {
    let (app, _model) = served().await;
    let body = sampled(TEXT, json!({"regex": "(\u{2603}|\u{2604}| the){5}", "max_tokens": 40, "ignore_eos": false}));
    let answer = ok(&app, "/v1/completions", with(body, json!({"logprobs": 2}))).await;
    let text = answer["choices"][0]["text"].as_str().unwrap();
    let rest = [" the", "\u{2603}", "\u{2604}"].iter().fold(text.to_owned(), |text, part| text.replace(part, ""));
    assert!(!text.is_empty() && rest.is_empty(), "{answer}");
}

#[tokio::test]
async fn chat_has_the_published_form_and_continues_in_a_session() {
    let (app, _model) = served().await;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\r\n\r\ntwo\n\n\nthree "},
        {"role": "assistant", "content": " Yes.\n\nNo."},
        {"role": "user", "content": "Why?"},
    ]);
    let rendered = ok(&app, "/apply-template", json!({"messages": messages})).await;
    let form = "<|rwkv_tokenizer_end_of_text|>System: Be brief.\n\nUser: one\ntwo\nthree\n\n\
        Assistant: Yes.\n\nNo.\n\nUser: Why?\n\nAssistant:";
    assert_eq!(rendered["prompt"], form);
    let thinking = json!({"messages": messages, "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(ok(&app, "/apply-template", thinking.clone()).await["prompt"], format!("{form} <think"));
    for answer in ["Be", " Be"] {
        let answer = json!({"role": "assistant", "content": answer});
        let begun = [messages.as_array().unwrap().as_slice(), &[answer]].concat();
        let continued = with(thinking.clone(), json!({"messages": begun, "continue_final_message": true}));
        assert_eq!(ok(&app, "/apply-template", continued).await["prompt"], format!("{form} Be"));
    }
    let tokens = ok(&app, "/tokenize", json!({"content": "\n\nUser the", "add_special": false})).await;
    assert_eq!(tokens["tokens"], json!([257, 258, 261]));

    let made = session(&app, json!({"seed": 5})).await;
    let chat = |messages: Value| json!({"messages": messages, "session": made["id"], "max_tokens": 6, "temperature": 1.0, "return_token_ids": true});
    let said = |text: &str| json!([{"role": "user", "content": text}]);
    ok(&app, "/v1/chat/completions", chat(said("Hi"))).await;
    let answer = ok(&app, "/v1/chat/completions", chat(said("Why?"))).await;
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant", "{answer}");
    // The second turn reads only what is new: the end of the first answer, "User: Why?" and "Assistant:".
    assert_eq!(answer["prompt_token_ids"], json!([257, 258, 59, 33, 88, 105, 122, 64, 257, 259, 59]), "{answer}");
}

#[tokio::test]
async fn an_answer_ends_before_the_next_turn_and_its_reasoning_is_apart() {
    let (app, _model) = served().await;
    let made = session(&app, json!({})).await;
    let text = " <think>\nIs it\\?\n</think>\n\nYes\\.\n\nUser: No";
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "session": made["id"], "max_tokens": 80, "regex": text});
    let answer = ok(&app, "/v1/chat/completions", body).await;
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("Is it?"), &json!("Yes.")), "{answer}");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null), "{answer}");
    let kept = app.get(&format!("{}/text", path(&made))).await.text();
    assert!(kept.contains("Yes.") && !kept.contains("Yes.\\n"), "{kept}");
}

#[tokio::test]
async fn reasoning_that_the_prompt_opens_is_before_json() {
    let (app, _model) = served().await;
    let tool = json!({"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}});
    let asking = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200,
        "chat_template_kwargs": {"enable_thinking": true}});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [[1, 2]]}}});
    for more in [
        json!({"response_format": schema}),
        json!({"response_format": schema, "tools": [tool], "tool_choice": "none"}),
        json!({"tools": [tool], "tool_choice": "required"}),
        json!({"tools": [tool]}),
    ] {
        // This model never ends its reasoning.
        let answer = ok(&app, "/v1/chat/completions", with(asking.clone(), more.clone())).await;
        let message = &answer["choices"][0]["message"];
        assert!(message["reasoning_content"].as_str().is_some_and(|text| !text.is_empty()), "{answer}");
        assert!(message["tool_calls"].is_null() && message["content"].as_str().unwrap_or("").is_empty(), "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
        // Without the tag, the answer is JSON or a call from its first token.
        let without =
            ok(&app, "/v1/chat/completions", with(with(asking.clone(), more), json!({"chat_template_kwargs": {}})))
                .await;
        assert!(without["choices"][0]["message"]["reasoning_content"].is_null(), "{without}");
    }
}

#[tokio::test]
async fn tools_are_described_and_called_in_the_form() {
    let (app, _model) = served().await;
    let tool = json!({"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}});
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "depth", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "How deep?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3 m"},
    ]);
    let body = json!({"messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 200});
    let rendered = ok(&app, "/apply-template", body.clone()).await;
    let form = "<|rwkv_tokenizer_end_of_text|>System: You can call these functions:\n\
        {\"name\": \"depth\", \"parameters\": {\"type\": \"object\"}}\n\
        To call one, answer with {\"name\": its name, \"arguments\": {its arguments}} and nothing else.\n\n\
        User: How deep?\n\nAssistant: I look.\n{\"name\": \"depth\", \"arguments\": {}}\n\
        {\"name\": \"depth\", \"arguments\": {}}\n\nUser: 3 m\n\nAssistant:";
    assert_eq!(rendered["prompt"], form);
    let answer = ok(&app, "/v1/chat/completions", body).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "depth", "{answer}");
}
