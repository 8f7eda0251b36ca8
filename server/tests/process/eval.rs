//! `tidegate eval` as a process: for every kind of model, its scores equal the log probabilities from the server.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::live::Server;
use crate::random::{written, written_rwkv7};

fn run(model: &Path, text: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["eval", "--threads", "1", "--device", "cpu", "--output", "json", "--model"])
        .args([model, "--text".as_ref(), text])
        .args(args)
        .env_remove("TIDEGATE_MODEL")
        .output()
        .unwrap()
}

fn score(model: &Path, text: &Path, args: &[&str]) -> Value {
    let output = run(model, text, args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", model.display());
    assert_eq!(error, "", "progress is shown only on terminals");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(model: &Path, text: &Path, args: &[&str]) -> String {
    let output = run(model, text, args);
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

fn shipped() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/checkpoints/tidegate-tiny")
}

/// Returns the total loss of the documents and the number of predicted tokens, as the server scores prompts with
/// `echo`. The tokens `around` come before and after each document.
fn scored_by_the_server(model: &Path, flags: &[&str], documents: &[&str], around: [u64; 2]) -> (f64, usize) {
    let data = tempfile::tempdir().unwrap();
    let model = ["--model", model.to_str().unwrap(), "--device", "cpu"];
    let server = Server::start(&data.path().join("data"), &[&model[..], flags].concat());
    let (mut nats, mut tokens) = (0.0, 0);
    for text in documents {
        let ids = server.json("POST", "/tokenize", &json!({"content": text}));
        let ids: Vec<u64> = ids["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        let prompt = [&around[..1], &ids, &around[1..]].concat();
        let body = json!({"prompt": prompt, "echo": true, "max_tokens": 0, "logprobs": 0});
        let answer = server.json("POST", "/v1/completions", &body);
        let logprobs = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        assert!(logprobs[0].is_null());
        nats -= logprobs[1..].iter().map(|logprob| logprob.as_f64().unwrap()).sum::<f64>();
        tokens += logprobs.len() - 1;
    }
    (nats, tokens)
}

#[test]
fn scores_are_those_that_the_server_gives_to_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let documents = ["The old woman had a goose, and the goose laid golden eggs.\nThat is all.", "Once upon a time 雪"];
    std::fs::write(&file, format!("<|endoftext|>\r\n{}\r\n<|endoftext|>{}", documents[0], documents[1])).unwrap();
    let bytes: usize = documents.iter().map(|text| text.len()).sum();
    let mamba2 = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures-mamba2-llamacpp/llamacpp.gguf");
    let [rwkv7, begins] = [written_rwkv7(), written_rwkv7()];
    let config = json!({"bos_token": "User", "add_bos_token": true}).to_string();
    std::fs::write(begins.path().join("tokenizer_config.json"), config).unwrap();
    for (model, flags, around) in [
        (shipped(), &[][..], [0, 0]),
        (shipped(), &["--state", "bf16"], [0, 0]),
        (shipped(), &["--backend", "candle"], [0, 0]),
        (mamba2, &[], [0, 0]),
        (rwkv7.path().into(), &[], [2, 2]),
        // "User" is the second word after the 256 single bytes of the vocabulary.
        (begins.path().into(), &[], [258, 2]),
    ] {
        let (nats, tokens) = scored_by_the_server(&model, flags, &documents, around);
        let found = score(&model, &file, flags);
        let name = format!("{} {flags:?}", model.display());
        assert_eq!(found["tokens"], tokens, "{name}");
        assert_eq!((&found["documents"], &found["bytes"]), (&2.into(), &bytes.into()), "{name}");
        let number = |key: &str| found[key].as_f64().unwrap();
        assert!((number("nats") - nats / tokens as f64).abs() < 1e-6, "{name}: {found}, {nats} in {tokens}");
        assert!((number("perplexity") - number("nats").exp()).abs() < 1e-6 * number("perplexity"), "{name}");
        let bits = nats / std::f64::consts::LN_2 / bytes as f64;
        assert!((number("bits_per_byte") - bits).abs() < 1e-6, "{name}");
    }
}

#[test]
fn a_limit_ends_within_a_document() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "a<|endoftext|>Once upon a time there was a king.").unwrap();
    let all = score(&shipped(), &file, &[]);
    // "a" and the token that ends its document are two of the four.
    let few = score(&shipped(), &file, &["--limit", "4"]);
    assert_eq!((&few["documents"], &few["tokens"], &few["bytes"]), (&2.into(), &4.into(), &10.into()), "{few}");
    assert_eq!(few["model"], "tidegate-tiny");
    assert_eq!(score(&shipped(), &file, &["--limit", "1000"])["nats"], all["nats"]);
    // The limit is reached exactly at the end of the first document.
    let first = score(&shipped(), &file, &["--limit", "2"]);
    assert_eq!((&first["documents"], &first["bytes"]), (&1.into(), &1.into()), "{first}");
    assert!(refused(&shipped(), &file, &["--limit", "0"]).contains("--limit"));
}

#[test]
fn without_tokens_around_a_text_its_first_token_is_not_predicted() {
    let model = written(&json!({"eos_token_id": []}));
    for name in ["generation_config.json", "tokenizer_config.json"] {
        std::fs::write(model.path().join(name), "{}").unwrap();
    }
    let file = model.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    tokenizer["post_processor"] = Value::Null;
    std::fs::write(file, tokenizer.to_string()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    std::fs::write(&file, "a<|endoftext|>aaa").unwrap();
    let found = score(model.path(), &file, &[]);
    // Each letter is a token here. In "a" nothing can be predicted, in "aaa" the second and third letter.
    assert_eq!((&found["documents"], &found["tokens"], &found["bytes"]), (&1.into(), &2.into(), &2.into()), "{found}");
    std::fs::write(&file, "a").unwrap();
    assert!(refused(model.path(), &file, &[]).contains("nothing to predict"));
}

#[test]
fn a_model_with_a_window_reads_token_by_token() {
    let model = written(&json!({"attention": "softmax", "sliding_window": 8, "position_embedding": "rope",
        "conv_kernel": 0, "output_norm": false}));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let text = "The fox said to the hare: how long is the river?";
    std::fs::write(&file, text).unwrap();
    let (nats, tokens) = scored_by_the_server(model.path(), &[], &[text], [0, 0]);
    let found = score(model.path(), &file, &[]);
    assert_eq!(found["tokens"], tokens);
    assert!((found["nats"].as_f64().unwrap() - nats / tokens as f64).abs() < 1e-6, "{found}, {nats} in {tokens}");
}

#[test]
fn what_cannot_be_scored_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let missing = folder.path().join("no model");
    for (text, words) in
        [(&b"<|endoftext|>\n\n"[..], "text.txt: the file has no text"), (b"fine\xff", "text.txt: not UTF-8 at byte 4")]
    {
        std::fs::write(&file, text).unwrap();
        let error = refused(&missing, &file, &[]);
        assert!(error.contains(words), "{error}");
    }
    let error = refused(&missing, &folder.path().join("none.txt"), &[]);
    assert!(error.contains("--text") && error.contains("none.txt: No such file"), "{error}");
    std::fs::write(&file, "text").unwrap();
    let translator = written(&json!({
        "model_type": "rfa_seq2seq", "attention": "rfa", "encoder_layers": 1, "max_source_positions": 8,
        "decoder_start_token_id": 0, "position_embedding": "rope", "conv_kernel": 0, "output_norm": false,
    }));
    let error = refused(translator.path(), &file, &[]);
    assert!(error.contains("an encoder-decoder predicts nothing without a source"), "{error}");
}
