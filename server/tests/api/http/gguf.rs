//! RWKV-7 in one GGUF file as llama.cpp writes it: it gives the same answers as its folder, with the file's tokenizer,
//! template and name.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::json;
use tempfile::TempDir;
use tidegate_model::{DecoderConfig, checkpoint};
use tidegate_server::checkpoint::{OpenOptions, model_name, open};
use tidegate_server::session::Location;

use crate::common::random::{WORDS, written_rwkv7};
use crate::common::sessions::{App, app_on, ok, prompt, session};
use crate::llamacpp::{self, Gguf, Value, text};

/// Writes a folder with the end-of-text token that GGUF files have, and returns a file of the same model.
fn written() -> (TempDir, Gguf) {
    let folder = written_rwkv7();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (config["bos_token_id"], config["eos_token_id"]) = (json!(0), json!(0));
    std::fs::write(&path, config.to_string()).unwrap();
    let bytes = std::fs::read(folder.path().join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| {
        let (shape, bytes) = (view.shape().to_vec(), view.data().to_vec());
        (name, llamacpp::Tensor { shape, kind: llamacpp::F32, bytes })
    });
    let single = (0..=u8::MAX).map(|byte| vec![byte]);
    let words = WORDS.iter().map(|word| word.as_bytes().to_vec());
    let tokens: Vec<Vec<u8>> = single.chain(words).chain([b"\xe2\x98".to_vec()]).collect();
    let config = DecoderConfig::from_json(&config.to_string()).unwrap();
    let file = llamacpp::rwkv7(&config, tensors.collect(), &tokens);
    (folder, file)
}

fn path(folder: &TempDir, file: &Gguf) -> PathBuf {
    let path = folder.path().join("tiny-f32.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

async fn served(model: &Path) -> App {
    app_on(model, OpenOptions { slots: 4, ..OpenOptions::default() }, Location::Memory).await
}

/// Returns an answer's choice without its timings.
fn untimed(answer: &serde_json::Value) -> serde_json::Value {
    let mut choice = answer["choices"][0].clone();
    choice.as_object_mut().unwrap().remove("timings");
    choice
}

#[tokio::test]
async fn a_file_answers_as_its_folder() {
    let (folder, file) = written();
    let (of_folder, of_file) = (served(folder.path()).await, served(&path(&folder, &file)).await);
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]);
    let chat = json!({"messages": messages, "max_tokens": 12, "seed": 1, "temperature": 1.0, "ignore_eos": true});
    for (route, body) in [
        ("/v1/completions", prompt("the fox said:", json!({"seed": 3, "max_tokens": 24, "temperature": 1.0}))),
        ("/v1/chat/completions", chat),
    ] {
        let [want, got] = [ok(&of_folder, route, body.clone()).await, ok(&of_file, route, body).await];
        assert_eq!((untimed(&got), &got["usage"]), (untimed(&want), &want["usage"]), "{route}");
    }
    for (route, body) in [
        ("/apply-template", json!({"messages": messages})),
        ("/tokenize", json!({"content": "\n\nUser the \u{2603}\t'\\", "with_pieces": true})),
    ] {
        let [want, got] = [ok(&of_folder, route, body.clone()).await, ok(&of_file, route, body).await];
        assert_eq!(got, want, "{route}");
    }
    let models = of_file.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "Tiny RWKV7", "{models}");
}

#[tokio::test]
async fn the_sampling_that_a_file_recommends_is_the_default() {
    let (folder, file) = written();
    let key = |name: &str| format!("general.sampling.{name}");
    let recommended = file
        .clone()
        .with(&key("temp"), Value::F32(0.5))
        .with(&key("top_p"), Value::F32(0.25))
        .with(&key("top_k"), Value::I32(20))
        .with(&key("min_p"), Value::U32(0))
        .with(&key("penalty_repeat"), Value::F32(1.5))
        .with(&key("mirostat"), Value::I32(2));
    let defaults = |app: App| async move {
        let params = app.get("/props").await.json()["default_generation_settings"]["params"].clone();
        ["temperature", "top_p", "top_k", "min_p", "repeat_penalty"].map(|name| params[name].as_f64().unwrap())
    };
    let of = served(&path(&folder, &recommended)).await;
    assert_eq!(defaults(of).await, [0.5, 0.25, 20.0, 0.0, 1.5]);
    let all = served(&path(&folder, &recommended.clone().with(&key("top_k"), Value::I32(-1)))).await;
    assert_eq!(defaults(all).await[2], 0.0);
    let likeliest = served(&path(&folder, &recommended.with(&key("temp"), Value::F32(-1.0)))).await;
    assert_eq!(defaults(likeliest).await[0], 0.0);
    for (name, value, words) in [
        ("temp", text("warm"), "general.sampling.temp must be a finite float, found a text"),
        ("top_p", Value::F32(7.0), "top_p must be"),
    ] {
        let path = path(&folder, &file.clone().with(&key(name), value));
        let error = open(&path, &OpenOptions::default()).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// The template in the file is the one that llama.cpp's converter writes.
#[tokio::test]
async fn the_template_of_the_file_is_used() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-rwkv7/llamacpp.gguf");
    let metadata = checkpoint::metadata(&fixture).unwrap();
    let source = metadata.text("tokenizer.chat_template").unwrap().unwrap();
    assert!(source.contains("bos_token"), "{source}");
    let (folder, file) = written();
    let app = served(&path(&folder, &file.with("tokenizer.chat_template", text(source)))).await;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " one\n\ntwo "},
        {"role": "assistant", "content": "<think>So.</think>\nYes."},
        {"role": "user", "content": "Why?"},
    ]);
    let rendered = ok(&app, "/apply-template", json!({"messages": messages})).await;
    let form = "<|rwkv_tokenizer_end_of_text|>System: Be brief.\n\nUser: one\n\ntwo\n\nAssistant: Yes.\n\nUser: Why?\n\nAssistant:";
    assert_eq!(rendered["prompt"], form);
    assert!(app.get("/props").await.json().get("chat_template_tool_use").is_none());
    let made = session(&app, json!({"seed": 5})).await;
    for content in ["Hi", "Why?"] {
        let said = json!([{"role": "user", "content": content}]);
        let body = json!({"messages": said, "session": made["id"], "max_tokens": 6, "temperature": 1.0});
        let answer = ok(&app, "/v1/chat/completions", body).await;
        assert_eq!(answer["choices"][0]["message"]["role"], "assistant", "{answer}");
    }
}

#[tokio::test]
async fn tools_may_have_a_template_of_their_own() {
    let (folder, file) = written();
    let own = "{{ tools[0].function.name }}: {{ messages[0].content }}";
    let file = file.with("tokenizer.chat_template", text("{{ messages[0].content }}"));
    let app = served(&path(&folder, &file.with("tokenizer.chat_template.tool_use", text(own)))).await;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]);
    for (body, prompt) in [
        (json!({"messages": messages}), "Hi"),
        (json!({"messages": messages, "tools": tools}), "look: Hi"),
        (json!({"messages": messages, "tools": tools, "tool_choice": "none"}), "Hi"),
    ] {
        assert_eq!(ok(&app, "/apply-template", body.clone()).await["prompt"], prompt, "{body}");
    }
    assert_eq!(app.get("/props").await.json()["chat_template_tool_use"], own);
}

#[tokio::test]
async fn control_tokens_are_special_and_unused_ones_are_no_text() {
    let (folder, mut file) = written();
    for (key, value) in &mut file.metadata {
        match value {
            Value::Texts(tokens) if key == "tokenizer.ggml.tokens" => tokens[270] = b"<extra>".to_vec(),
            Value::Words(types) if key == "tokenizer.ggml.token_type" => types[270] = 3,
            _ => {}
        }
    }
    let app = served(&path(&folder, &file)).await;
    let tokens = ok(&app, "/tokenize", json!({"content": "a<extra>b", "add_special": false})).await;
    assert_eq!(tokens["tokens"], json!([98, 270, 99]));
    let tokens = ok(&app, "/tokenize", json!({"content": "[PAD271]", "add_special": false})).await;
    assert_eq!(tokens["tokens"].as_array().unwrap().len(), "[PAD271]".len());
}

#[test]
fn a_wrong_tokenizer_or_template_is_refused_with_its_key() {
    let (folder, file) = written();
    let error = |file: &Gguf| open(&path(&folder, file), &OpenOptions::default()).err().unwrap().to_string();
    let token = |id: usize, bytes: &[u8]| {
        let mut file = file.clone();
        for (_, value) in &mut file.metadata {
            if let Value::Texts(tokens) = value {
                tokens[id] = bytes.to_vec();
            }
        }
        file
    };
    for (file, reason) in [
        (
            file.clone().with("tokenizer.ggml.model", text("bert")),
            "tokenizer.ggml.model must be rwkv, gpt2 or llama, found bert",
        ),
        (file.clone().without("tokenizer.ggml.model"), "tokenizer.ggml.model must be rwkv, gpt2 or llama, found none"),
        (
            file.clone().with("tokenizer.ggml.model", Value::U32(1)),
            "tokenizer.ggml.model must be a text in UTF-8, found 1",
        ),
        (
            file.clone().with("tokenizer.ggml.token_type", Value::Words(vec![1; 9])),
            "tokenizer.ggml.token_type must have 272 numbers, found 9",
        ),
        (file.clone().with("tokenizer.ggml.token_type", text("1")), "must be a list of 32-bit numbers, found a text"),
        (token(5, b""), "tokenizer.ggml.tokens: token 5: a token must have at least one byte"),
        (token(98, b"b"), "tokenizer.ggml.tokens: token 99: the bytes are those of token 98"),
        (token(98, b"aa"), "tokenizer.ggml.tokens: must have a token for every single byte, and has none for 0x61"),
        (file.clone().with("tokenizer.chat_template", text("{% for")), "chat template: syntax error"),
        (
            file.clone()
                .with("tokenizer.chat_template", text(""))
                .with("tokenizer.chat_template.tool_use", text("{% for")),
            "chat template tool_use: syntax error",
        ),
        (file.clone().with("tokenizer.chat_template", Value::Text(b"\xff".into())), "must be a text in UTF-8"),
        (file.clone().with("general.architecture", text("llama")), "its memory grows with the text"),
    ] {
        let found = error(&file);
        assert!(found.contains("tiny-f32.gguf") && found.contains(reason), "{found}\nexpected: {reason}");
    }
}

#[test]
fn the_name_is_the_one_in_the_file_or_else_the_files() {
    let (folder, file) = written();
    let name = |file: &Gguf| model_name(&path(&folder, file));
    assert_eq!(name(&file), "Tiny RWKV7");
    assert_eq!(name(&file.clone().with("general.name", text(" a/b "))), "a/b");
    for value in [
        text(""),
        text("  "),
        text("a\u{7}b"),
        text("a\nb"),
        text(&"a".repeat(129)),
        Value::U32(1),
        Value::Text(b"\xff".into()),
    ] {
        assert_eq!(name(&file.clone().with("general.name", value.clone())), "tiny-f32", "{value:?}");
    }
    assert_eq!(name(&file.clone().without("general.name")), "tiny-f32");
    assert_eq!(model_name(folder.path()), folder.path().file_name().unwrap().to_str().unwrap());
}
