//! `--draft-model`: what the flag does, and what it refuses.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::live::{Server, get};

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny")
}

/// Returns the value of a metric.
fn metric(server: &Server, name: &str) -> u64 {
    let metrics = get(&server.address, "/metrics").unwrap().text();
    let line =
        metrics.lines().find(|line| line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name} ")));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name} in {metrics}"))
}

#[test]
fn a_draft_model_proposes_what_the_model_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (shipped(), folder.path().join("data"));
    let body = json!({"prompt": "Once upon a time", "n_predict": 60, "seed": 3, "ignore_eos": true});
    let flags = ["--device", "cpu", "--draft", "none", "--draft-max", "3"];
    let with = [&flags[..], &["--draft-model", model.to_str().unwrap()]].concat();
    let [plain, drafted] = [&flags[..], &with].map(|flags| {
        let server = Server::start(&data, flags);
        let answer = server.json("POST", "/completion", &body);
        let counted = ["drafted", "draft_accepted"]
            .map(|name| metric(&server, &format!("tidegate_generation_tokens_{name}_total")));
        let told = ["draft_n", "draft_n_accepted"].map(|name| answer["timings"][name].as_u64().unwrap_or(0));
        assert_eq!(counted, told);
        (answer["content"].clone(), counted)
    });
    assert_eq!(plain.0, drafted.0);
    assert_eq!(plain.1, [0, 0]);
    // The draft model is the served model: all its tokens are kept, but it is too slow to pay off, as the first steps
    // measure.
    let [read, kept] = drafted.1;
    assert!(read > 0 && kept == read, "{kept} of {read}");
}

#[test]
fn a_draft_model_with_other_tokens_and_one_for_several_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(shipped().join(name), other.join(name)).unwrap();
    }
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(shipped().join("tokenizer.json")).unwrap()).unwrap();
    let tokens = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let [first, second] = ["a", "b"].map(|token| tokens[token].clone());
    tokens.insert("a".into(), second);
    tokens.insert("b".into(), first);
    std::fs::write(other.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let (shipped, other) = (shipped(), other.to_str().unwrap());
    let shipped = shipped.to_str().unwrap();
    for (args, words) in [
        (&["--draft-model", other][..], "a draft model needs the tokens of the served model: token "),
        (&["--draft-model", "/nowhere"], "--draft-model: /nowhere: there is no such file or folder"),
        (&["--draft-model", shipped, "--backend", "candle"], "reads no drafts on"),
        (
            &["--draft-model", shipped, "--model", shipped, "--model", other],
            "--draft-model proposes tokens for one model",
        ),
    ] {
        let server = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--device", "cpu", "--port", "0", "--data-dir"])
            .arg(folder.path().join("data"))
            .args(args)
            .output()
            .unwrap();
        let error = String::from_utf8(server.stderr).unwrap();
        assert!(!server.status.success() && error.contains(words), "{args:?}: {error}");
    }
}
