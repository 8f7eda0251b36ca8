//! RWKV-7 in a `.pth` file with its vocabulary next to it.

use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;
use tidegate_server::checkpoint::{OpenOptions, model_name, open};
use tidegate_server::session::Location;

use crate::common::random::written_rwkv7;
use crate::common::sessions::{app_on, prompt};

/// Copies the fixture, which PyTorch has written, to its own folder.
fn copied() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("rwkv7-tiny.pth");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-rwkv7/package.pth");
    std::fs::copy(fixture, &path).unwrap();
    (folder, path)
}

fn error(path: &Path) -> String {
    open(path, &OpenOptions::default()).err().unwrap().to_string()
}

#[test]
fn the_vocabulary_must_lie_beside_the_file() {
    let (folder, path) = copied();
    let want = "RWKV's vocabulary file, rwkv_vocab_v20230424.txt, must be in the same folder, or be named";
    assert_eq!(error(&path), format!("{}: {want}", path.display()));
    let vocabulary = folder.path().join("rwkv_vocab_v20230424.txt");
    std::fs::write(&vocabulary, "1 'a' 1\n").unwrap();
    let found = error(&path);
    assert!(found.starts_with(&vocabulary.display().to_string()), "{found}");
    let found = error(folder.path());
    assert!(
        found.ends_with("rwkv7-tiny.pth may be RWKV-7 in one file: if so, name the file instead of its folder"),
        "{found}"
    );
}

#[tokio::test]
async fn a_pth_is_served_with_the_vocabulary_beside_it() {
    let ((folder, path), vocabulary) = (copied(), written_rwkv7());
    let name = "rwkv_vocab_v20230424.txt";
    std::fs::copy(vocabulary.path().join(name), folder.path().join(name)).unwrap();
    let app = app_on(&path, OpenOptions { slots: 4, ..OpenOptions::default() }, Location::Memory).await;
    let models = app.get("/v1/models").await.json();
    assert_eq!((models["data"][0]["id"].as_str(), model_name(&path).as_str()), (Some("rwkv7-tiny"), "rwkv7-tiny"));
    let tokens = app.post("/tokenize", json!({"content": " the fox"})).await.json();
    assert_eq!(tokens["tokens"], json!([261, 263]));
    let body = prompt("the fox said:", json!({"max_tokens": 16, "temperature": 1.0, "seed": 1, "ignore_eos": true}));
    let answer = app.post("/v1/completions", body).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 16, "{answer}");
    let messages = json!([{"role": "user", "content": "Why?"}]);
    let rendered = app.post("/apply-template", json!({"messages": messages})).await.json();
    assert_eq!(rendered["prompt"], "<|rwkv_tokenizer_end_of_text|>User: Why?\n\nAssistant:");
}
