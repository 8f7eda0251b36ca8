//! Options of vLLM and llama.cpp for the chat template: continued and open messages, variables and tools, with the same
//! result on each route.

use crate::common::parrot::parrot;
use crate::common::{events, send, text, with};
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tidegate_server::AppState;

/// A template that writes all of its input.
const SHOWS_ALL: &str = "{% if tools %}{{ tools[0].function.name }}|{% endif %}{{ mood | default('calm') }}\
    {% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[assistant:{% endif %}";

fn model() -> AppState {
    let folder = tempfile::tempdir().unwrap();
    parrot("ok", SHOWS_ALL, folder.path())
}

async fn ask(state: &AppState, path: &str, body: &Value) -> (StatusCode, Value) {
    let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
    let response = send(state, request.body(Body::from(body.to_string())).unwrap()).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap())
}

fn asking(more: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Once"}]}), more)
}

fn tool() -> Value {
    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}])
}

#[tokio::test]
async fn the_template_gets_what_the_body_says_on_each_route() {
    let state = model();
    for (more, shown) in [
        (json!({}), "calm[user:u][assistant:Once][assistant:"),
        (json!({"add_generation_prompt": false}), "calm[user:u][assistant:Once]"),
        (json!({"continue_final_message": true}), "calm[user:u][assistant:Once"),
        (json!({"continue_final_message": true, "add_generation_prompt": false}), "calm[user:u][assistant:Once"),
        (json!({"chat_template_kwargs": {"mood": "wild", "other": [1]}}), "wild[user:u][assistant:Once][assistant:"),
        (json!({"tools": tool()}), "f|calm[user:u][assistant:Once][assistant:"),
        (json!({"tools": tool(), "tool_choice": "none"}), "calm[user:u][assistant:Once][assistant:"),
    ] {
        let body = asking(with(more.clone(), json!({"return_token_strs": true, "max_tokens": 2})));
        let (status, rendered) = ask(&state, "/apply-template", &body).await;
        assert_eq!((status, &rendered), (StatusCode::OK, &json!({"prompt": shown})), "{more}");
        let (_, tokens) = ask(&state, "/tokenize", &body).await;
        let (status, answer) =
            ask(&state, "/v1/chat/completions", &with(body, json!({"return_token_ids": true}))).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["prompt_token_ids"], tokens["tokens"], "{more}");
        let (_, read) = ask(&state, "/detokenize", &json!({"tokens": tokens["tokens"]})).await;
        assert_eq!(read["content"].as_str().unwrap().trim_start_matches("<|endoftext|>"), shown, "{more}");
    }
}

#[tokio::test]
async fn what_cannot_be_written_is_refused_by_name() {
    let state = model();
    let user = json!([{"role": "user", "content": "u"}]);
    for path in ["/v1/chat/completions", "/apply-template", "/tokenize"] {
        for (param, more) in [
            ("continue_final_message", json!({"continue_final_message": true, "add_generation_prompt": true})),
            ("continue_final_message", json!({"continue_final_message": true, "tools": tool()})),
            ("continue_final_message", json!({"continue_final_message": 1})),
            ("messages", json!({"continue_final_message": true, "messages": user})),
            ("messages", json!({"continue_final_message": true, "messages": [{"role": "assistant", "content": "x"}]})),
            ("chat_template_kwargs", json!({"chat_template_kwargs": {"messages": []}})),
            ("chat_template_kwargs", json!({"chat_template_kwargs": {"chat_template": "x"}})),
            ("chat_template_kwargs", json!({"chat_template_kwargs": [1]})),
        ] {
            let (status, answer) = ask(&state, path, &asking(more.clone())).await;
            assert_eq!(
                (status, &answer["error"]["param"]),
                (StatusCode::BAD_REQUEST, &json!(param)),
                "{more}: {answer}"
            );
        }
    }
}

#[tokio::test]
async fn a_stream_has_the_ids_of_its_prompt_once_and_the_usage_throughout() {
    let state = model();
    for (path, body) in [
        ("/v1/chat/completions", asking(json!({"max_tokens": 5}))),
        ("/v1/completions", json!({"prompt": "u", "max_tokens": 5})),
    ] {
        let options = json!({"include_usage": true, "continuous_usage_stats": true});
        let more = json!({"stream": true, "stream_options": options, "return_token_ids": true, "ignore_eos": true});
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let body = Body::from(with(body, more).to_string());
        let stream = text(send(&state, request.body(body).unwrap()).await).await;
        let data = events(&stream);
        let chunks: Vec<Value> = data.iter().filter_map(|data| serde_json::from_str(data).ok()).collect();
        let used = |chunk: &Value| {
            let usage = &chunk["usage"];
            let [prompt, completion, total] = ["prompt_tokens", "completion_tokens", "total_tokens"]
                .map(|name| usage[name].as_u64().unwrap_or_else(|| panic!("{path}: no usage in {chunk}")));
            assert_eq!(prompt + completion, total, "{chunk}");
            completion
        };
        let counts: Vec<u64> = chunks.iter().map(used).collect();
        assert!(counts.is_sorted() && counts.last() == Some(&5) && counts.contains(&2), "{path}: {counts:?}");
        let ids: Vec<&Value> = chunks
            .iter()
            .flat_map(|chunk| [&chunk["prompt_token_ids"], &chunk["choices"][0]["prompt_token_ids"]])
            .filter(|ids| ids.is_array())
            .collect();
        assert_eq!(ids.len(), 1, "{path}: {chunks:?}");
    }
}

#[tokio::test]
async fn the_tokenizer_is_described() {
    let response = send(&model(), Request::get("/tokenizer_info").body(Body::empty()).unwrap()).await;
    let info: Value = serde_json::from_str(&text(response).await).unwrap();
    assert_eq!((&info["eos_token"], &info["chat_template"]), (&json!("<|endoftext|>"), &json!(SHOWS_ALL)));
    assert_eq!(
        (&info["tokenizer_class"], &info["model_max_length"]),
        (&json!("PreTrainedTokenizerFast"), &json!(10_000))
    );
}
