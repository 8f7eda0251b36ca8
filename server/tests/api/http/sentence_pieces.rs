//! A model of Mamba-2 whose tokenizer is in the manner of SentencePiece, as Codestral-Mamba's is.

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_server::checkpoint::OpenOptions;
use tidegate_server::session::Location;

use crate::common::pieces::{SPACES, Space, VOCABULARY, tokenizer};
use crate::common::random::written_about;
use crate::common::sessions::{App, app_on, ok, prompt, session};

const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
    {{ '[INST] ' + message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}";

async fn served(space: Space) -> (TempDir, App) {
    let keys = json!({"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "attention": "mamba2",
        "intermediate_size": 64, "head_dim": 32, "state_size": 16, "n_groups": 2,
        "time_step_limit": [0.0, {"__float__": "Infinity"}], "output_norm": false, "vocab_size": VOCABULARY,
        "bos_token_id": 1, "eos_token_id": 2});
    let folder = written_about(0.0, &keys);
    let write = |name: &str, json: Value| std::fs::write(folder.path().join(name), json.to_string()).unwrap();
    write("tokenizer.json", tokenizer(space));
    write("tokenizer_config.json", json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}));
    write("generation_config.json", json!({"eos_token_id": 2}));
    let app = app_on(folder.path(), OpenOptions { slots: 4, ..OpenOptions::default() }, Location::Memory).await;
    (folder, app)
}

async fn tokens(app: &App, content: &str, special: bool) -> Value {
    ok(app, "/tokenize", json!({"content": content, "add_special": special})).await["tokens"].take()
}

#[tokio::test]
async fn texts_are_read_with_the_space_and_shown_without_it() {
    for space in SPACES {
        let (_folder, app) = served(space).await;
        for text in ["the river", "Hello \u{1f980} \u{65e5}\u{672c}\n\n123  the", "\u{e9}t\u{e9}[", ""] {
            let bare = tokens(&app, text, false).await;
            let shown = ok(&app, "/detokenize", json!({"tokens": bare})).await;
            assert_eq!(shown["content"], text, "{space:?}");
            let whole = tokens(&app, text, true).await;
            assert_eq!(whole[0], 1);
            let body = json!({"prompt": whole, "max_tokens": 0, "echo": true});
            assert_eq!(ok(&app, "/v1/completions", body).await["choices"][0]["text"], text, "{space:?}");
            if !text.is_empty() {
                let body = json!({"prompt": text, "max_tokens": 1, "logprobs": 1, "echo": true, "ignore_eos": true});
                let answer = ok(&app, "/v1/completions", body).await;
                let offsets = answer["choices"][0]["logprobs"]["text_offset"].as_array().unwrap();
                assert_eq!(*offsets.last().unwrap(), text.chars().count(), "{space:?} {text:?}: {answer}");
                if text == "the river" {
                    assert_eq!(*offsets, [0, 0, 3, 9], "{space:?}: {answer}");
                }
            }
        }
    }
}

#[tokio::test]
async fn two_turns_are_the_whole_text_in_one() {
    for space in SPACES {
        let (_folder, app) = served(space).await;
        let made = session(&app, json!({"text": "the river"})).await;
        let more = json!({"session": made["id"], "ignore_eos": true});
        let first = ok(&app, "/v1/completions", prompt(" and the fox said", more.clone())).await;
        let second = ok(&app, "/v1/completions", prompt("", more)).await;
        let more = json!({"ignore_eos": true, "max_tokens": 16});
        let whole = ok(&app, "/v1/completions", prompt("the river and the fox said", more)).await;
        let ids = |answer: &Value| answer["choices"][0]["token_ids"].as_array().unwrap().clone();
        assert_eq!([ids(&first), ids(&second)].concat(), ids(&whole), "{space:?}");
        let text = app.get(&format!("/v1/sessions/{}/text", made["id"].as_str().unwrap())).await.json();
        let answer = whole["choices"][0]["text"].as_str().unwrap();
        assert_eq!(text["text"], format!("the river and the fox said{answer}"), "{space:?}");

        let made = session(&app, json!({})).await;
        let more = json!({"session": made["id"], "ignore_eos": true});
        let answer = ok(&app, "/v1/completions", prompt("the river", more)).await["choices"][0]["text"].take();
        let messages = app.get(&format!("/v1/sessions/{}/messages", made["id"].as_str().unwrap())).await.json();
        let contents: Vec<_> = messages["data"].as_array().unwrap().iter().map(|message| &message["content"]).collect();
        assert_eq!(contents, [&json!("the river"), &answer], "{space:?}");
    }
}

#[tokio::test]
async fn a_conversation_is_read_like_its_whole_text() {
    for space in SPACES {
        let (_folder, app) = served(space).await;
        let made = session(&app, json!({})).await;
        let asked = |content: &str, more: Value| {
            let mut body = json!({"messages": [{"role": "user", "content": content}], "session": made["id"], "max_tokens": 6,
                "temperature": 0, "return_token_ids": true});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        // The answer ends at once, so that the text is that of the messages alone.
        let bias = json!({"logit_bias": {"2": 100}});
        let first = ok(&app, "/v1/chat/completions", asked("the fox", bias)).await;
        assert_eq!(first["choices"][0]["message"]["content"], "", "{first}");
        let second = ok(&app, "/v1/chat/completions", asked("Hello 123", json!({"ignore_eos": true}))).await;
        let body = json!({"prompt": "<s>[INST] the fox[/INST]</s>[INST] Hello 123[/INST]", "add_special_tokens": false,
            "max_tokens": 6, "temperature": 0, "ignore_eos": true, "return_token_ids": true});
        let whole = ok(&app, "/v1/completions", body).await;
        assert_eq!(second["choices"][0]["token_ids"].as_array().map(Vec::len), Some(6), "{second}");
        assert_eq!(second["choices"][0]["token_ids"], whole["choices"][0]["token_ids"], "{space:?}: {second} {whole}");
    }
}

#[tokio::test]
async fn an_answer_follows_a_schema_and_a_stream_shows_the_same() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["the fox", "n"], "properties": {
        "the fox": {"enum": ["\u{1f980} \u{e9}t\u{e9}", "b\"c"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}}});
    for space in SPACES {
        let (_folder, app) = served(space).await;
        for seed in 1..5 {
            let format =
                json!({"type": "json_schema", "json_schema": {"name": "fox", "strict": true, "schema": schema}});
            let body = json!({"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 400, "temperature": 1,
                "seed": seed, "response_format": format});
            let answer = ok(&app, "/v1/chat/completions", body.clone()).await;
            let choice = &answer["choices"][0];
            assert_eq!(choice["finish_reason"], "stop", "{space:?}: {answer}");
            let text = choice["message"]["content"].as_str().unwrap();
            let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
            assert!(value["n"].is_u64() && value["the fox"].is_string(), "{text}");

            let mut body = body;
            body["stream"] = true.into();
            let stream = app.post("/v1/chat/completions", body).await.text();
            let pieces = crate::common::events(&stream).into_iter().filter_map(|data| {
                let chunk: Value = serde_json::from_str(data).ok()?;
                Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())
            });
            assert_eq!(pieces.collect::<String>(), text, "{space:?}");
        }
    }
}

#[tokio::test]
async fn a_text_that_begins_with_the_answer_has_no_added_space() {
    let (_folder, app) = served(Space::First).await;
    let the = tokens(&app, "the", false).await[0].as_u64().unwrap();
    let body =
        json!({"prompt": [1], "max_tokens": 2, "temperature": 0, "logit_bias": {the.to_string(): 100}, "logprobs": 1});
    let answer = ok(&app, "/v1/completions", body).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["logprobs"]["text_offset"]), (&json!("the the"), &json!([0, 3])), "{answer}");
}
