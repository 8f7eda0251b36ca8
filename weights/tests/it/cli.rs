//! The binary: tables for people, JSON for machines, and errors on stderr with a failing status.

use std::process::{Command, Output};

use crate::common::fixture;

fn weights(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate-weights"));
    command.args(arguments).env("TIDEGATE_MODEL", fixture()).output().unwrap()
}

fn text() -> String {
    fixture().join("marked.txt").display().to_string()
}

#[test]
fn eval_prints_a_table_or_json() {
    let table = String::from_utf8(weights(&["eval", "--text", &text()]).stdout).unwrap();
    assert!(table.contains("bits per byte") && table.contains("documents"), "{table}");
    let out = weights(&["eval", "--text", &text(), "--limit", "50", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(json["tokens"], 50);
    assert!(json["bits_per_byte"].as_f64().unwrap() > 0.0);
}

#[test]
fn inspect_prints_tables_or_json() {
    let model = fixture().display().to_string();
    let tables = String::from_utf8(weights(&["inspect", "--model", &model, "--text", &text()]).stdout).unwrap();
    for part in ["random matrices (fixed)", "state bytes per conversation", "half-life", "clamped denominators"] {
        assert!(tables.contains(part), "{part} is not in\n{tables}");
    }
    let json: serde_json::Value = serde_json::from_slice(&weights(&["inspect", "--json"]).stdout).unwrap();
    assert_eq!(json["heads"].as_array().unwrap().len(), 4);
    assert!(json["on_text"].is_null());
}

#[test]
fn errors_go_to_stderr() {
    let out = weights(&["eval", "--text", "/no/such/file"]);
    assert!(!out.status.success() && out.stdout.is_empty());
    let message = String::from_utf8(out.stderr).unwrap();
    assert!(message.contains("text: cannot open /no/such/file"), "{message}");
    let out = weights(&["eval", "--text", &text(), "--limit", "0"]);
    assert!(!out.status.success() && String::from_utf8(out.stderr).unwrap().contains("--limit"));
}

#[test]
fn threads_are_as_many_as_asked_for_and_change_no_result() {
    let eval =
        |threads: &str| weights(&["--threads", threads, "eval", "--text", &text(), "--limit", "50", "--json"]).stdout;
    let (one, three) = (eval("1"), eval("3"));
    assert!(!one.is_empty() && one == three);
    let refused = weights(&["eval", "--text", &text(), "--threads", "0"]);
    assert!(refused.status.code() == Some(2) && String::from_utf8(refused.stderr).unwrap().contains("--threads"));
}
