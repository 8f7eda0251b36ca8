//! Mamba-2 in one GGUF file as llama.cpp writes it: it has the tokens and the template of its folder.

use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use tidegate_model::DecoderConfig;
use tidegate_server::checkpoint::{OpenOptions, open};
use tidegate_server::session::Location;

use crate::common::sessions::{App, app_on, ok, prompt};
use crate::llamacpp::{self, Gguf, Value, text};

/// Returns the fixture's folder; its `llamacpp.gguf` is the output of llama.cpp's converter for the folder.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-mamba2-llamacpp")
}

async fn served(model: &Path) -> App {
    app_on(model, OpenOptions { slots: 4, ..OpenOptions::default() }, Location::Memory).await
}

#[tokio::test]
async fn a_file_has_the_tokens_and_the_template_of_its_folder() {
    let (of_folder, of_file) = (served(&fixture()).await, served(&fixture().join("llamacpp.gguf")).await);
    for content in [
        "the river and the fox",
        "  the   rain\n\n    in\tthe  \r\n end ",
        "I'll say: 'it's 1234, don't!' \u{2603}\u{1f980} na\u{ef}ve e\u{301} \u{212b}",
        "a<|endoftext|>b<|padding|> <|none|>",
        "",
    ] {
        let body = json!({"content": content, "with_pieces": true});
        let [want, got] = [ok(&of_folder, "/tokenize", body.clone()).await, ok(&of_file, "/tokenize", body).await];
        assert_eq!(got, want, "{content:?}");
    }
    let messages = json!([{"role": "user", "content": "the rain"}, {"role": "assistant", "content": "in the river"}]);
    let body = json!({"messages": messages});
    let [want, got] =
        [ok(&of_folder, "/apply-template", body.clone()).await, ok(&of_file, "/apply-template", body).await];
    assert_eq!(got, want);
    assert_eq!(got["prompt"], "user: the rain<|endoftext|>assistant: in the river<|endoftext|>");
    assert_eq!(of_file.get("/v1/models").await.json()["data"][0]["id"], "Tiny Mamba2");
    let body = prompt("the river", json!({"max_tokens": 200, "temperature": 1.0, "seed": 4, "ignore_eos": false}));
    let answer = ok(&of_file, "/v1/completions", body).await;
    assert!(answer["usage"]["completion_tokens"].as_u64() > Some(0), "{answer}");
}

/// Returns the fixture as a file that tests can change, with its tokens in the order of their ids.
fn written() -> (TempDir, Gguf) {
    let bytes = std::fs::read(fixture().join("model.safetensors")).unwrap();
    let config = DecoderConfig::from_json(&std::fs::read_to_string(fixture().join("config.json")).unwrap()).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| {
        let numbers: Vec<f32> = view
            .data()
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&bf16| f32::from_bits(u32::from(u16::from_le_bytes(bf16)) << 16))
            .collect();
        (name, llamacpp::Tensor::floats(view.shape(), &numbers))
    });
    let tokenizer: Json = serde_json::from_slice(&std::fs::read(fixture().join("tokenizer.json")).unwrap()).unwrap();
    let file = llamacpp::mamba2_with(&config, tensors.collect(), &tokenizer);
    (TempDir::new().unwrap(), file)
}

fn path(folder: &TempDir, file: &Gguf) -> PathBuf {
    let path = folder.path().join("tiny-f32.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

#[tokio::test]
async fn the_tokens_around_a_text_are_those_that_the_file_asks_for() {
    let (folder, file) = written();
    let file =
        file.with("tokenizer.ggml.bos_token_id", Value::U32(1)).with("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let app = served(&path(&folder, &file)).await;
    let of_folder = served(&fixture()).await;
    let body = json!({"content": "the rain", "add_special": true});
    let [with, without] = [ok(&app, "/tokenize", body.clone()).await, ok(&of_folder, "/tokenize", body).await];
    let ids = without["tokens"].as_array().unwrap();
    assert_eq!(with["tokens"].as_array().unwrap()[..], [&[json!(1)], ids.as_slice()].concat());
}

#[test]
fn a_wrong_tokenizer_is_refused_with_its_key() {
    let (folder, file) = written();
    assert!(open(&path(&folder, &file), &OpenOptions::default()).is_ok());
    let token = |id: usize, bytes: &[u8]| {
        let mut file = file.clone();
        for (key, value) in &mut file.metadata {
            match value {
                Value::Texts(tokens) if key == "tokenizer.ggml.tokens" => tokens[id] = bytes.to_vec(),
                _ => {}
            }
        }
        file
    };
    let merges = |merges: &[&str]| {
        let merges = merges.iter().map(|merge| merge.as_bytes().to_vec()).collect();
        file.clone().with("tokenizer.ggml.merges", Value::Texts(merges))
    };
    for (file, reason) in [
        (
            file.clone().with("tokenizer.ggml.model", text("bert")),
            "tokenizer.ggml.model must be rwkv, gpt2 or llama, found bert",
        ),
        (file.clone().with("tokenizer.ggml.pre", text("llama-bpe")), "pre must be gpt-2, mpt, olmo, found llama-bpe"),
        (file.clone().without("tokenizer.ggml.pre"), "tokenizer.ggml.pre must be gpt-2, mpt, olmo, found none"),
        (file.clone().without("tokenizer.ggml.merges"), "tokenizer.ggml.merges must be given, found none"),
        (merges(&["ab"]), "tokenizer.ggml.merges: merge 0 must be two tokens with a space between"),
        (merges(&["t h", "a zz"]), "out of vocabulary"),
        (token(5, b"\xff"), "tokenizer.ggml.tokens: token 5 must be UTF-8"),
        (token(66, b"b"), "tokenizer.ggml.tokens: tokens 66 and 67 have the same text"),
        (token(66, b"bb"), "must have a token for every byte of a text, and has none for 0x61"),
        (
            file.clone().with("tokenizer.ggml.add_bos_token", Value::Bool(true)).without("tokenizer.ggml.bos_token_id"),
            "tokenizer.ggml.bos_token_id must be given, because add_bos_token is true",
        ),
        (
            file.clone()
                .with("tokenizer.ggml.add_bos_token", Value::Bool(true))
                .with("tokenizer.ggml.bos_token_id", Value::U32(9)),
            "token 9 must be a special token",
        ),
        (
            file.clone().with("tokenizer.ggml.add_eos_token", text("yes")),
            "add_eos_token must be true or false, found a text",
        ),
    ] {
        let found = open(&path(&folder, &file), &OpenOptions::default()).err().unwrap().to_string();
        assert!(found.contains("tiny-f32.gguf") && found.contains(reason), "{found}\nexpected: {reason}");
    }
}
