//! Evaluation: scores equal the trainer's (golden values computed in Python), and the state does not grow.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use tidegate_model::Device;
use tidegate_weights::eval::{Checkpoint, EvalError, EvalReport, evaluate};

use crate::common::fixture;

fn run(checkpoint: &Checkpoint, path: &Path, limit: Option<u64>) -> Result<EvalReport, EvalError> {
    evaluate(checkpoint, path, limit, &mut |_| ())
}

#[derive(Deserialize)]
struct Golden {
    limit: Option<u64>,
    tokens: u64,
    bytes: u64,
    nats: f64,
    perplexity: f64,
    bits_per_byte: f64,
}

#[test]
fn scores_equal_those_of_the_trainer() {
    let text = std::fs::read_to_string(fixture().join("golden.json")).unwrap();
    let golden: BTreeMap<String, Vec<Golden>> = serde_json::from_str(&text).unwrap();
    assert_eq!(golden.len(), 2);
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    for (file, cases) in golden {
        for want in cases {
            let got = run(&checkpoint, &fixture().join(&file), want.limit).unwrap();
            assert_eq!((got.tokens, got.bytes), (want.tokens, want.bytes), "{file}, limit {:?}", want.limit);
            assert!((got.nats - want.nats).abs() < 1e-3, "{file}: {} and {}", got.nats, want.nats);
            assert!((got.bits_per_byte - want.bits_per_byte).abs() < 1e-3);
            assert!((got.perplexity / want.perplexity - 1.0).abs() < 1e-3);
        }
    }
}

#[test]
fn documents_are_counted() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let marked = fixture().join("marked.txt");
    assert_eq!(run(&checkpoint, &marked, None).unwrap().documents, 3);
    assert_eq!(run(&checkpoint, &marked, Some(5)).unwrap().documents, 1);
    assert_eq!(run(&checkpoint, &fixture().join("plain.txt"), None).unwrap().documents, 1);
}

#[test]
fn a_document_does_not_depend_on_the_previous_one() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let total = |text: &str| {
        let path = folder.path().join("text");
        std::fs::write(&path, text).unwrap();
        let report = run(&checkpoint, &path, None).unwrap();
        report.nats * report.tokens as f64
    };
    let (a, b) = ("The heron stepped aside, gravely.", "She had 27 eggs and a letter.");
    let apart = total(a) + total(b);
    assert!((total(&format!("{a}<|endoftext|>{b}")) - apart).abs() < 1e-3);
    assert!((total(&format!("{a}{b}")) - apart).abs() > 1e-2);
}

#[test]
fn the_state_is_the_same_for_any_text() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.txt");
    std::fs::write(&path, "The river rose in the night. ".repeat(2000)).unwrap();
    let long = run(&checkpoint, &path, None).unwrap();
    let short = run(&checkpoint, &fixture().join("plain.txt"), Some(1)).unwrap();
    assert!(long.tokens > 20_000 && short.tokens == 1);
    assert_eq!(long.state_bytes, short.state_bytes);
    assert_eq!(long.state_bytes, checkpoint.decoder.config().state_bytes());
}

#[test]
fn progress_ends_at_the_whole_file() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let path = fixture().join("plain.txt");
    let mut seen = Vec::new();
    let report = evaluate(&checkpoint, &path, None, &mut |p| seen.push((p.tokens, p.bytes_read))).unwrap();
    assert!(seen.is_sorted());
    assert_eq!(seen.last(), Some(&(report.tokens, std::fs::metadata(&path).unwrap().len())));
}

#[test]
fn errors_name_what_cannot_be_evaluated() {
    let checkpoint = Checkpoint::load(&fixture(), &Device::Cpu).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    let error = |path: &Path, limit| run(&checkpoint, path, limit).unwrap_err().to_string();
    assert!(error(&path, None).starts_with("text: cannot open"));
    std::fs::write(&path, "\n<|endoftext|>\n").unwrap();
    assert_eq!(error(&path, None), "text: holds no text");
    std::fs::write(&path, b"ab\xff").unwrap();
    assert_eq!(error(&path, None), "text: not UTF-8 at byte 2");
    assert_eq!(error(&fixture().join("plain.txt"), Some(0)), "limit: must be at least 1, found 0");
    let missing = Checkpoint::load(folder.path(), &Device::Cpu).err().unwrap().to_string();
    assert!(missing.contains("tokenizer.json"), "{missing}");
}

/// PyTorch's score of the shipped checkpoint on `story.txt`, computed by `eval` of the training package.
const STORY: &str = include_str!("../fixtures/story.json");

#[test]
fn the_shipped_checkpoint_has_the_score_of_pytorch() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checkpoint = Checkpoint::load(&root.join("checkpoints/tidegate-tiny"), &Device::Cpu).unwrap();
    let report = run(&checkpoint, &root.join("tests/fixtures/story.txt"), None).unwrap();
    let golden: Golden = serde_json::from_str(STORY).unwrap();
    assert_eq!((report.tokens, report.bytes), (golden.tokens, golden.bytes));
    assert!((report.nats - golden.nats).abs() < 1e-3, "{report:?}, PyTorch says {} nats", golden.nats);
    assert!(report.bits_per_byte < 2.0, "{report:?}");
}
